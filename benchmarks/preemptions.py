"""Preempts a training on Slurm at random moments, and counts what is lost.

    python benchmarks/preemptions.py --count 100      # where sbatch is, in a folder that the nodes share

`jobs/slurm.sbatch` starts the training on two nodes with two ranks each. Again and again its batch script gets the
signal that Slurm sends before the time limit, at a random moment after a start, and the job goes back into the queue.
A checkpoint is only made when the ranks are told to save. At the end each sample has to be in each epoch exactly once,
and no preemption may have lost more than one update. The updates of a start are compared with those of the next one
that trained. The exit code is 1 when it is not so, and when less than half of the signals have led to a comparison.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos_records import Start, problems_of, read_result, read_starts
from trainer.errors import TrainerError
from trainer.watch.failure import report_failures

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("runs/preemptions")
PAUSE_S = 0.1
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
"""States that a job does not leave, unlike NODE_FAIL and PREEMPTED."""
_POLL_S = 0.5
_RUNNING_WITHIN_S = 600.0


def main() -> int:
    report_failures()
    options = _parse_args()
    if FOLDER.exists():
        raise TrainerError(f"{FOLDER} is there already; remove it, or rename it")
    FOLDER.mkdir(parents=True)
    began = time.monotonic()
    job = submit(options.count * options.epochs_each)
    done = preempt(job, options.count, options.longest_s, random.Random(options.seed))  # noqa: S311 (no secret)
    while (state := state_of(job)[0]) not in ENDS:
        time.sleep(_POLL_S)
    took_s = time.monotonic() - began
    problems = [] if state == "COMPLETED" else [f"job {job} has ended as {state}"]
    return report(read_starts(FOLDER), done, took_s, problems)


def submit(epochs: int) -> str:
    """Submit the training; return the job's id."""
    training = [FOLDER, epochs, FOLDER / "checkpoints", "--dataset", "digits", "--every-s", 86400, "--pause-s", PAUSE_S]
    command = [
        *["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--job-name=preemptions"],
        *[str(ROOT / "jobs/slurm.sbatch"), "python", "-m", "benchmarks.chaos_job", *map(str, training)],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainerError(f"the training cannot be submitted: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # a federation adds the cluster's name


def state_of(job: str) -> tuple[str, int]:
    """Return a job's state, and how often it has been started again; no state where Slurm does not answer."""
    shown = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True, check=False)
    found = re.search(r"JobState=(\w+).* Restarts=(\d+)", shown.stdout)
    return (found[1], int(found[2])) if found else ("", 0)


def preempt(job: str, count: int, longest_s: float, choice: random.Random) -> int:
    """Preempt a job so many times; return how many signals Slurm has taken."""
    delivered = 0
    for number in range(count):
        if not _wait_for_start(job, number):
            break
        time.sleep(choice.uniform(0.0, longest_s))
        done = subprocess.run(["scancel", "--batch", "--signal=USR2", job], capture_output=True, check=False)
        delivered += done.returncode == 0
        print(f"{time.strftime('%H:%M:%S')} preemption {number + 1} of {count}", flush=True)
    return delivered


def _wait_for_start(job: str, restarts: int) -> bool:
    """Wait until a job has been started again so often; return whether it has, or has ended before."""
    deadline = time.monotonic() + _RUNNING_WITHIN_S
    while time.monotonic() < deadline:
        state, restarted = state_of(job)
        if state == "RUNNING" and restarted >= restarts:
            return True
        if state in ENDS:
            return False
        time.sleep(_POLL_S)
    raise TrainerError(f"job {job} has not been started again within {_RUNNING_WITHIN_S:.0f} s")


def lost_updates(starts: Sequence[Start]) -> list[int]:
    """Return for each start but the last how many of its updates the next one has done again."""
    firsts = [int(start.records[0]["update"][0]) for start in starts]
    lasts = [max(int(records["update"][-1]) for records in start.records if len(records)) for start in starts]
    return [last - (first - 1) for last, first in zip(lasts[:-1], firsts[1:], strict=True)]


def report(starts: Sequence[Start], preemptions: int, took_s: float, problems: list[str]) -> int:
    """Print what has come of it; return the exit code."""
    if (FOLDER / "result.json").exists():
        result = read_result(FOLDER)
        problems += problems_of(result, starts)
        print(f"\ntest accuracy {result.accuracy:.2f} % after {result.epochs} epochs, {took_s:.0f} s")
    else:
        problems.append("there is no result")
    lost = Counter(lost_updates(starts))
    comparisons = lost.total()
    head = ["preemptions", "starts that trained", "comparisons", *(f"lost {number}" for number in sorted(lost))]
    cells = [preemptions, len(starts), comparisons, *(lost[number] for number in sorted(lost))]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}\n| {' | '.join(map(str, cells))} |\n")
    if not preemptions or 2 * comparisons < preemptions:
        problems.append(f"{comparisons} of {preemptions} preemptions can be judged; --longest-s may be too short")
    if any(number > 1 for number in lost):
        problems.append("a preemption has lost more than one update")
    if any(number < 0 for number in lost):
        problems.append("a start has left updates out")
    print("\n".join(problems) if problems else "each sample once in each epoch")
    return int(bool(problems))


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--count", type=int, default=100, metavar="N", help="preemptions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: %(default)s)")
    parser.add_argument(
        "--longest-s", type=float, default=60.0, metavar="S",
        help="from a start to the signal, at most (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--epochs-each", type=int, default=6, metavar="N",
        help="epochs of the training for each preemption, about as many as a start comes to (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
