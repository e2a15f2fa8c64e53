"""Which hosts are looked for while a job runs without them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from trainer.ops.supervise import rejoin, remote
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.rejoin import Rejoin
from trainer.ops.supervise.remote import Answer

A, B = Host("a", 2), Host("b", 2)


def reason(monkeypatch: pytest.MonkeyPatch, hosts: Sequence[Host], bad: Sequence[str] = (), wanted: bool = True) -> str:
    """Return why a job on these hosts is to be started again, where every host answers."""

    def answer(asked: Sequence[Host], *_: object) -> list[Answer]:
        return [Answer(host.name, is_well=True) for host in asked]

    monkeypatch.setattr(remote, "on_all_hosts", answer)
    monkeypatch.setattr(rejoin, "_PROBE_S", 0.0)
    settings = Options(ranks=4, hosts=(A, B), command=("x",), min_ranks=2, take_back=wanted)
    asking = Rejoin(settings, hosts, bad)
    deadline = time.monotonic() + 1.0
    try:
        while not (text := asking.reason()) and time.monotonic() < deadline and asking._inquiry is not None:
            time.sleep(0.01)
    finally:
        asking.close()
        if asking._inquiry is not None:
            asking._inquiry._pool.shutdown()  # which nothing else waits for
    return text


def test_a_host_that_answers_again_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch, [A]) == "b answers again, and is taken back"
    assert reason(monkeypatch, [A], wanted=False) == ""
    assert reason(monkeypatch, [A, B]) == ""


def test_a_host_that_is_left_out_for_its_failures_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch, [A], bad=["b"]) == ""
