"""What a job's processes know, and what they prove: the token that ranks agree on, proofs, and sealed data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import ConfigError, TrainerError, World
from trainer.cluster.environment import SECRET
from trainer.cluster.identity import job_secret, job_token, seal, unseal
from trainer.cluster.rendezvous import Rendezvous
from trainer.ops.supervise.launchers import environment_for

WORLD = World()


class Watched(Rendezvous):
    """A rendezvous of one rank that keeps what went over it."""

    def __init__(self) -> None:
        super().__init__(WORLD)
        self.seen: list[str] = []

    def all_gather(self, text: str) -> list[str]:
        self.seen.append(text)
        return super().all_gather(text)


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET, "HOROVOD_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", [SECRET, "HOROVOD_JOB_SECRET"])
def test_with_a_secret_the_token_does_not_go_over_the_rendezvous(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "5e" * 32)
    first, second = Watched(), Watched()
    token = job_token(first, WORLD)
    assert token not in first.seen[0]
    assert len(token) == 64
    assert job_token(second, WORLD) != token
    monkeypatch.setattr("secrets.token_hex", lambda _: first.seen[0])
    assert job_token(second, WORLD) == token
    monkeypatch.setenv(name, "6e" * 32)
    assert job_token(second, WORLD) != token


def test_every_rank_adds_to_the_token_and_sees_what_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous, first = Watched(), World(rank=0, size=2)
    monkeypatch.setattr("secrets.token_hex", lambda _: "a part")
    tokens = []
    for parts in (["a part", "one"], ["a part", "another"]):
        monkeypatch.setattr(rendezvous, "all_gather", lambda _, parts=parts: parts)
        tokens.append(job_token(rendezvous, first))
    assert tokens[0] != tokens[1]
    monkeypatch.setattr(rendezvous, "all_gather", lambda _: ["an earlier one", "one"])
    with pytest.raises(TrainerError, match="what this rank has put there was changed"):
        job_token(rendezvous, first)


@pytest.mark.parametrize("secret", ["abc", "x" * 64])
def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigError, match=rf"^TRAINER_SECRET has {len(secret)} characters; valid are") as error:
        job_secret({SECRET: secret})
    assert secret not in str(error.value)


def test_the_supervisors_secret_comes_first_and_is_new_at_every_start() -> None:
    assert job_secret({SECRET: "a" * 64, "HOROVOD_JOB_SECRET": "b" * 64}) == "a" * 64
    assert job_secret({SECRET: "", "HOROVOD_JOB_SECRET": "b" * 64}) == "b" * 64
    assert job_secret({}) == ""
    given = [environment_for("a job")[SECRET] for _ in range(2)]
    assert given[0] != given[1]
    assert all(len(bytes.fromhex(secret)) == 32 for secret in given)


@settings(deadline=None)
@given(data=st.binary(max_size=60), at=st.integers(0, 200))
def test_data_is_taken_as_it_was_sealed(data: bytes, at: int) -> None:
    token, facts = "5e" * 32, ("object", 3, 1)
    sealed = seal(token, data, *facts)
    assert unseal(token, sealed, *facts) == data
    changed = bytearray(sealed)
    changed[at % len(sealed)] ^= 1
    others = (("object", 2, 1), ("object", 3, 0), ("message", 3, 1), ("object", 31), ("object3", 1))
    assert all(unseal(token, sealed, *other) is None for other in others)
    for other_token, other in (("6e" * 32, sealed), (token, bytes(changed)), (token, b"")):
        assert unseal(other_token, other, *facts) is None
