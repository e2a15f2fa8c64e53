"""How long the ranks of a job take to join one another, by their number: real ranks, on this host.

    python -m benchmarks.join --ranks 2 4 8 16 32

A rank's CPU time tells more than the clock where ranks share cores. Starting Python and importing PyTorch do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine, load
from trainer.errors import TrainerError
from trainer.watch.failure import report_failures

LAUNCHERS = ("torchrun", "horovodrun")
_TIMEOUT_S = 900.0


def join(launcher: str, ranks: int) -> dict[str, float]:
    """Return the figures of one job: until its slowest rank has joined.

    Raises:
        TrainerError: the job has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch(str(Path(__file__).with_name("join_job.py")), ranks, launcher), folder]
        if (finished := run(command, timeout_s=_TIMEOUT_S)).problem is not None:
            raise TrainerError(f"{launcher}, {ranks} ranks: {finished.problem}")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    return {
        "s": max(figures["join s"] for figures in found),
        "CPU ms of a rank": statistics.median(figures["join CPU s"] for figures in found) * 1e3,
    }


def main() -> int:
    report_failures()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="(default: 2 to 16)")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts (default: %(default)s)")
    args = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), f"load {load():.1f}", sep="; ")
    for launcher in LAUNCHERS:
        found = {ranks: [join(launcher, ranks) for _ in range(args.repeats)] for ranks in args.ranks}
        print(f"\n| {launcher} | {' | '.join(map(str, args.ranks))} |\n|{'---|' * (len(args.ranks) + 1)}")
        for figure in found[args.ranks[0]][0]:
            medians = [statistics.median(job[figure] for job in jobs) for jobs in found.values()]
            print(f"| {figure} | {' | '.join(f'{value:.3g}' for value in medians)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
