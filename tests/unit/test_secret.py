"""The token that ranks agree on: derived from the job's secret where there is one, else handed over."""

from __future__ import annotations

import pytest

from trainer import World
from trainer.launch.environment import SECRET
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.secret import job_secret, job_token
from trainer.supervise.launchers import environment_for

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
    for name in (SECRET, "HOROVOD_RENDEZVOUS_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", [SECRET, "HOROVOD_RENDEZVOUS_SECRET"])
def test_with_a_secret_the_token_does_not_go_over_the_rendezvous(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "known to the job")
    one, other = Watched(), Watched()
    token = job_token(one, WORLD)
    assert token not in one.seen[0]
    assert len(token) == 64
    assert job_token(other, WORLD) != token
    other.all_gather = lambda text: one.seen  # type: ignore[method-assign]
    assert job_token(other, WORLD) == token
    monkeypatch.setenv(name, "another")
    assert job_token(other, WORLD) != token


def test_without_one_it_does() -> None:
    rendezvous = Watched()
    assert [job_token(rendezvous, WORLD)] == rendezvous.seen


def test_the_supervisors_secret_comes_first_and_is_new_at_every_start() -> None:
    assert job_secret({SECRET: "a", "HOROVOD_RENDEZVOUS_SECRET": "b"}) == "a"
    assert job_secret({SECRET: "", "HOROVOD_RENDEZVOUS_SECRET": "b"}) == "b"
    assert job_secret({}) == ""
    found = [environment_for("a job")[SECRET] for _ in range(2)]
    assert found[0] != found[1]
    assert all(len(bytes.fromhex(one)) == 32 for one in found)
