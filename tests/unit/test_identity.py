"""What a job's processes know, and what they prove: the token that ranks agree on, and proofs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from examples.strategies.parameter_server.identity import is_proof, job_secret, job_token, prove
from trainer import ConfigError
from trainer.cluster.environment import SECRET
from trainer.ops.supervise.launchers import environment_for


def gather_from(seen: list[str], *others: str) -> Callable[[str], list[str]]:
    """Return an all-gather that keeps what this rank has sent."""

    def all_gather(text: str) -> list[str]:
        seen.append(text)
        return [text, *others]

    return all_gather


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET, "HOROVOD_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", [SECRET, "HOROVOD_JOB_SECRET"])
def test_with_a_secret_the_token_is_not_sent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "5e" * 32)
    seen: list[str] = []
    token = job_token(gather_from(seen))
    assert token not in seen[0]
    assert len(token) == 64
    assert job_token(gather_from(seen)) != token
    monkeypatch.setattr("secrets.token_hex", lambda _: seen[0])
    assert job_token(gather_from(seen)) == token
    assert job_token(gather_from(seen, "another rank's")) != token
    monkeypatch.setenv(name, "6e" * 32)
    assert job_token(gather_from(seen)) != token


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


def test_a_proof_holds_for_its_facts_and_no_others() -> None:
    proof = prove("a token", "parameter server", "10.0.0.1:1", 12, "h")
    assert is_proof(proof, "a token", "parameter server", "10.0.0.1:1", "12", b"h")
    for facts in (("10.0.0.1:1", 1, "2h"), ("10.0.0.1:11", 2, "h"), ("10.0.0.1:1", 12), ("10.0.0.1:1", 12, "h", "")):
        assert not is_proof(proof, "a token", "parameter server", *facts)
    assert not is_proof(proof[:-1], "a token", "parameter server", "10.0.0.1:1", 12, "h")
