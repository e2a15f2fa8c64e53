"""Trainings that lose a rank, their launcher or their supervisor: whether they end as if nothing had happened.

    python benchmarks/faults.py --trials 54

Each trial starts a training with `trainer run` on two ranks of this host, makes one fault at a random update, and waits
for the end. A trial has ended right if the exit codes are the documented ones, one restart was enough, no process is
left, the final weights are bit for bit those of a training without a fault, and its lineage has every sample of every
epoch once. Recovery is the time from the fault to the first update after it.

The faults and the launchers come in a random order. The folder of a trial that has not ended right is kept. A full disk
is a small one in memory, which only root can mount. It needs Linux, and about ten seconds a trial.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import benchmarks  # noqa: F401 (with it, what follows is found)
from measuring import interrupt_on, parser_of
from tests.faults.job_faults import FAULTS
from tests.faults.job_trials import LAUNCHERS, Trial, Trials, draw, faults
from trainer.watch.failure import report_failures


def table(trials: Sequence[Trial]) -> str:
    """Format the trials, a fault per row, as Markdown."""
    rows = [["fault", "trials", "ended right", "median recovery, s", "p95, s", "lost", "processes left"]]
    for fault in [*dict.fromkeys(trial.plan.fault for trial in trials), ""]:
        found = [trial for trial in trials if fault in ("", trial.plan.fault)]
        rows.append([
            fault or "**all**", str(len(found)), str(sum(not trial.problems for trial in found)),
            _seconds(found, statistics.median), _seconds(found, _p95),
            str(sum(trial.is_lost for trial in found)), str(sum(trial.left for trial in found)),
        ])  # fmt: skip
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _p95(values: Sequence[float]) -> float:
    """Return the value that at most 5 % of the values are above."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _seconds(trials: Sequence[Trial], summarize: Callable[[Sequence[float]], float]) -> str:
    values = [trial.recovery_s for trial in trials if trial.recovery_s is not None]
    return f"{summarize(values):.1f}" if values else "–"


def plan(wanted: Sequence[str], launchers: Sequence[str], count: int, seed: int) -> Iterator[Trial]:
    """Yield so many trials: in a random order all faults, then again under other launchers, until each had each."""
    rng = random.Random(seed)  # noqa: S311 (no secret)
    turn = rng.sample(list(wanted), len(wanted))
    for number in range(count):
        lap, place = divmod(number, len(turn))
        yield draw(turn[place], launchers[(place + lap) % len(launchers)], rng)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=27, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="may be repeated (default: all)")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="may be repeated (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args(arguments)


def _describe(trial: Trial) -> str:
    plan = trial.plan
    verdict = f"{'; '.join(trial.problems)}; see {trial.folder}" if trial.problems else "right"
    where = f"rank {plan.rank}, update {plan.update}, {plan.place}"
    return f"{plan.fault}, {trial.launcher} ({where}): {_seconds([trial], max)} s, {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    report_failures()
    interrupt_on(signal.SIGTERM, signal.SIGHUP)
    args = _parse(arguments)
    launchers, wanted = args.launcher or LAUNCHERS, args.fault or faults()
    folder = Path(tempfile.mkdtemp(prefix="trainer-faults-"))
    trials, done = Trials(folder), []
    for number, trial in enumerate(plan(wanted, launchers, args.trials, args.seed), 1):
        done.append(trials.run(trial))
        print(f"{number} of {args.trials}: {_describe(trial)}", file=sys.stderr, flush=True)
    print(table(done))
    if any(trial.problems for trial in done):
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
