"""The all-reduce of `trainer doctor --gpu`, on CPUs over Gloo in place of GPUs over NCCL."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainer.ops.doctor import call
from trainer.ops.doctor.call import NO_ANSWER, source_of
from trainer.ops.doctor.checks import Facts, HostFacts, judge
from trainer.ops.doctor.look import all_reduce
from trainer.ops.supervise.hosts import Host

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 90.0
HERE, AGAIN = (HostFacts(host=Host(name, 1), peer=name) for name in ("localhost", "127.0.0.1"))
HERE.answer = AGAIN.answer = {
    "names": [(name, {"source": "127.0.0.1", "interface": "lo"}) for name in ("localhost", "127.0.0.1")]
}


def stand_in(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Have the hosts run another program."""
    monkeypatch.setattr(call, "source_of", lambda _: source)


def processes_with(text: str) -> list[str]:
    """Return the processes with such a variable, but for this one, which got it later than /proc shows."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        processes += [file.parent.name] * any(text in word for word in words)
    return processes


def test_two_ranks_of_one_host_sum_right_and_say_how_fast() -> None:
    tried = all_reduce((HERE, HERE), "gloo", LIMIT_S)
    assert (tried["hosts"], tried["wrong"], tried["bytes"]) == (["localhost"], 0, 2**20)
    # Of two ranks, the bus bandwidth of nccl-tests is that of the algorithm: 2 (n - 1) / n is 1.
    assert tried["bus_bytes_per_s"] == pytest.approx(tried["bytes"] / tried["seconds"])
    assert tried["bus_bytes_per_s"] > 1e6


def test_two_hosts_sum_and_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("all_reduce")
    right, wrong = "values = start + rank\n", "values = start + rank + rank * (start == 7)\n"
    assert source.count(right) == 1
    stand_in(monkeypatch, source.replace(right, wrong))
    tried = all_reduce((HERE, AGAIN), "gloo", LIMIT_S)
    assert tried["hosts"] == ["localhost", "127.0.0.1"]
    assert tried["wrong"] == 2 * 263  # of 2**18 values, those whose remainder is 7, and no others; on both ranks


def test_a_rank_that_fails_is_told_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        monkeypatch,
        "import json, sys, time\nrank = json.loads(sys.stdin.buffer.readline())['rank']\n"
        "rank or print('{\"answer\": 1}', flush=True)\n1 / (1 - rank) and time.sleep(1000)",
    )
    started = time.monotonic()
    tried = all_reduce((HERE, HERE), "gloo", LIMIT_S)
    assert time.monotonic() - started < LIMIT_S
    (finding,) = judge(Facts(here="a", hosts=(), all_reduces=[tried]))
    assert "on GPUs of localhost fails: ZeroDivisionError: division by zero; " in finding[1]


def test_ranks_that_hang_are_killed_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_MARK", "of the ranks that hang")
    stand_in(monkeypatch, "import time; time.sleep(1000)")
    assert all_reduce((HERE, HERE), "gloo", 2) == {"hosts": ["localhost"], "error": NO_ANSWER, "output": ""}
    assert processes_with("DOCTOR_MARK=of the ranks that hang") == []
