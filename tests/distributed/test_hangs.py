"""Hangs, made for real under each strategy: one verdict names the right rank, the job ends, and nothing is left."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.hangs import FAULTS, JOB, STRATEGIES, Trial, run_trial
from tests.distributed import harness
from tests.distributed.harness import processes_of, wait_until
from tests.distributed.test_supervise import Supervised, command, supervised
from tests.security.running import Running, running

__all__ = ["supervised"]

pytestmark = pytest.mark.timeout(200)

# What a rank waits for is noted above the transport. Further below, a rank that is stopped is started again.
QUICK = {("ddp", "backward"), ("horovod over Gloo", "skips")}
# The transport or the strategy ends these by itself, with an error.
ERRORS = {"shape", "exits"} | {("ddp", "skips"), ("ddp", "one-too-many")}
# `test_supervise` has ("ddp", "shape").
QUICK_ERRORS = {("horovod over MPI", "exits")}
LINE = re.compile(
    r"no progress for \d+ s: rank 1 on \S+ did not come to .+|rank 1 on \S+ .+|ranks 0, 2 on \S+ wait for .+"
    r"|    File \".+|what to do: .+|each rank's stack is in runs/hang_job-hang-[\d-]+-\S+\.txt"
)


def cases(*, errors: bool) -> list[Any]:
    found = []
    for strategy, fault in itertools.product(STRATEGIES, FAULTS):
        is_error = fault in ERRORS or (strategy, fault) in ERRORS
        if is_error == errors and fault != "cut-off":  # only root can cut off a host
            marks = [] if (strategy, fault) in QUICK | QUICK_ERRORS else [pytest.mark.slow]
            found.append(pytest.param(strategy, fault, marks=marks, id=f"{strategy}-{fault}".replace(" ", "-")))
    return found


def check(trial: Trial) -> None:
    assert trial.code not in (0, None), trial.output
    assert len(trial.verdicts) == 1, trial.output
    assert trial.culprits == [1], trial.output
    said = [line.partition("trainer: hang: ")[2] for line in trial.output.splitlines() if "trainer: hang: " in line]
    assert [line for line in said if not LINE.fullmatch(line)] == []
    assert trial.seconds is not None
    assert trial.seconds < 4 + 15
    assert trial.left == ()


@pytest.mark.parametrize(("strategy", "fault"), cases(errors=False))
def test_the_rank_that_keeps_the_others_waiting_is_named(strategy: str, fault: str) -> None:
    check(run_trial(strategy, fault, 4.0))


@pytest.mark.slow  # as over NCCL; test_hang_recorder.py reads what PyTorch records
@pytest.mark.parametrize("fault", ["sleeps", "spins", "loader"])
def test_where_collectives_return_before_they_are_done_the_flight_recorder_tells_who_waits(fault: str) -> None:
    trial = run_trial("ddp", fault, 4.0, ("--as-over-nccl",), {"TRAINER_FLIGHT_RECORDER": "1"})
    check(trial)
    assert re.search(r"rank 1 on \S+ did not come to collective \d+ of process group 0", trial.output)


def test_a_collective_that_one_rank_alone_calls_is_named_with_its_line() -> None:
    trial = run_trial("ddp", "collective-alone", 4.0, ("--step", "10"))
    check(trial)
    where = r": rank 1 in torch\.distributed\.barrier \(after step 10\) at hang_job\.py:\d+"
    assert re.search(where, trial.verdicts[0])
    assert "every rank has to call the same collectives" in trial.output
    assert "network" not in trial.output.partition("trainer: hang: ")[2]


@pytest.mark.parametrize(("strategy", "fault"), cases(errors=True))
def test_a_job_that_ends_because_its_ranks_differ_names_the_one_that_does(strategy: str, fault: str) -> None:
    trial = run_trial(strategy, fault, 30.0)
    assert trial.code not in (0, None), trial.output
    assert trial.verdicts == ()
    assert trial.blamed == [1], trial.output
    advice = "take as many steps, and to call" if fault == "exits" else "call the same collectives in the same order"
    assert f"trainer: why it failed: every rank has to {advice}" in trial.output
    assert trial.left == ()


@contextmanager
def on_two_hosts(folder: Path, fault: str, rank: int) -> Iterator[Running]:
    """Context with a job of one rank on each of two hosts."""
    job = f"{JOB} {fault} --rank {rank} --strategy ddp --hang-timeout 3"
    with running(harness.on_two_hosts(job), folder=folder) as started:
        yield started


def wait_for(job: Running, text: str) -> None:
    wait_until(lambda: text in job.text(), 60, job.text)


ELSEWHERE = "the cause may be on another host; the limit without progress is 540 s"


@pytest.mark.slow
@pytest.mark.needs("root")
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_hosts_the_one_with_a_rank_that_sleeps_ends_the_job_and_names_it(rank: int, tmp_path: Path) -> None:
    with on_two_hosts(tmp_path, "sleeps", rank) as job:
        wait_for(job, "fault is made")
        assert job.process.wait(45) != 0, job.text()
        told = re.findall(r"trainer: hang: no progress for \d+ s: (.*)", job.text())
        assert len(told) == 1, job.text()
        assert re.fullmatch(rf"rank {rank} on \S+ is in no collective, and ranks of other hosts may be in one", told[0])
        assert re.search(r'trainer: hang:     File ".*hang_job\.py", line \d+, in make_fault', job.text())


@pytest.mark.slow
@pytest.mark.needs("root")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_a_debugger_has_stopped_ends_the_job_on_no_host(rank: int, tmp_path: Path) -> None:
    with on_two_hosts(tmp_path, "stopped", rank) as job:
        wait_for(job, ELSEWHERE)
        time.sleep(6)
        text = job.text()
        assert text.count(ELSEWHERE) == text.count("are stopped; hangs are watched for when they go on") == 1
        assert re.search(rf"rank {1 - rank} on \S+ waits for all_reduce of 10 elements .* at hang_job", text)
        assert "trainer: hang: " not in text
        for process in processes_of(job.mark):
            process.send_signal(signal.SIGCONT)
        assert job.process.wait(45) == 0, job.text()
        assert "trained" in job.text()


@pytest.mark.slow
@pytest.mark.needs("root")
def test_where_a_host_is_cut_off_each_side_says_that_the_cause_may_be_on_another() -> None:
    trial = run_trial("ddp", "cut-off", 4.0, timeout_s=40.0)
    assert trial.verdicts == (), trial.output
    assert trial.output.count(ELSEWHERE) == 2, trial.output


def test_a_job_that_hangs_is_started_again_and_the_verdict_is_told(supervised: Supervised) -> None:
    ended = supervised.run("-np", "2", "--gloo", "--hang-timeout", "4", "--timeout", "80", *command("SIGSTOP"))
    assert ended.code == 0, ended.output
    first, second = ended.attempts()
    assert first["event"] == "hung"
    assert re.fullmatch(r"no progress for \d+ s: rank 1 on \S+ did not come to the gradients of step \d+", first["end"])
    assert second["event"] == "done"
    assert ended.output.count("trainer: hang: no progress") == 1


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on_afterwards(supervised: Supervised) -> None:
    process = supervised.start(
        "-np", "2", "--torchrun", "--hang-timeout", "3", "--timeout", "80", *command("none", "--updates", "400")
    )
    supervised.wait_for(supervised.has_saved)
    ranks = [one for one in processes_of(str(supervised.folder)) if _is_rank(one)]
    assert len(ranks) == 2
    for number, wait_s in ((signal.SIGSTOP, 7.0), (signal.SIGCONT, 0.0)):
        for rank in ranks:
            rank.send_signal(number)
        time.sleep(wait_s)
    ended = supervised.wait(process)
    assert ended.code == 0, ended.output
    assert [attempt["event"] for attempt in ended.attempts()] == ["done"]
    assert "trainer: hang: " not in ended.output
    assert ended.output.count("are stopped; hangs are watched for when they go on") == 1


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return Path(process.cmdline()[1]).name == "job_that_is_killed.py" and "RANK" in process.environ()
    return False
