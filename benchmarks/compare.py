"""Compares the library with plain Horovod and with DDP, on this machine, in one sitting.

python benchmarks/compare.py --data-dir data

All train the tutorial network on MNIST: batch 100 per rank, SGD with learning rate 0.01 and momentum 0.5, one
thread per rank; on one rank, bound to one core, and on two. They take turns, round after round, in an order that
turns round with every round. Of each run the first epoch is discarded. Evaluation is not counted. Exits with code 1
when a run failed or trained wrongly; a missed target is no failure.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import results
from benchmarks.common import BATCH_SIZE, LEARNING_RATE, MOMENTUM, REPORT_PREFIX, mnist_folder
from benchmarks.contestants import CONTESTANTS, Course, Run, differing_losses, start
from benchmarks.launching import launch, on_one_core, run
from benchmarks.machine import describe_machine, load
from benchmarks.overhead import Overhead
from examples.datasets.mnist import FILES
from trainer.files import check_writable
from trainer.launch.failure import report_failures
from trainer.launch.processes import INTERRUPTS, interrupt_on

SETTINGS = {
    "network": "tutorial",
    "batch per rank": BATCH_SIZE,
    "learning rate": LEARNING_RATE,
    "momentum": MOMENTUM,
    "threads per rank": 1,
}
MOST_LOAD = 0.5


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--help` shows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="in a run (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("bench.json"), metavar="FILE", help="raw samples, too (default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS), help="(default: all)"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], choices=[1, 2], help="(default: 1 2)")
    parser.add_argument("--no-overhead", action="store_true", help="leave out the cost of our layer per step")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="of one run, seconds (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    if args.epochs < 2:
        parser.error(f"--epochs is {args.epochs}; it must be at least 2, because the first one is discarded")
    return args


def decompress_mnist(folder: Path, root: Path) -> None:
    """Lays MNIST out under `root` as torchvision wants it: decompressed, in MNIST/raw."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in [name for pair in FILES.values() for name in pair]:
        if (folder / name).exists():
            (raw / name).symlink_to((folder / name).resolve())
        else:
            with gzip.open(folder / f"{name}.gz") as source, (raw / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def run_rounds(args: argparse.Namespace, course: Course) -> list[Run]:
    """Every contestant once a round, every other round in reverse; a line on stderr for each run."""
    order = [(name, ranks) for ranks in dict.fromkeys(args.ranks) for name in dict.fromkeys(args.only)]
    runs: list[Run] = []
    for number in range(args.repeats):
        for name, ranks in order if number % 2 == 0 else order[::-1]:
            started = time.monotonic()
            found = start(name, ranks, number, course)
            runs.append(found)
            word = found.problem or f"{results.epoch_seconds(found):.2f} s/epoch"
            _say(
                f"[{len(runs)}/{len(order) * args.repeats}] {name} on {ranks}: {word} "
                f"(run {time.monotonic() - started:.0f} s, load {load():.1f})"
            )
    return runs


def measure_overheads(ranks: Sequence[int], timeout_s: float) -> tuple[list[Overhead], list[str]]:
    """What `overhead.py` finds for each number of ranks, and what went wrong."""
    found, problems = [], []
    for number in dict.fromkeys(ranks):
        command = launch("benchmarks/overhead.py", number)
        finished = run(on_one_core(command) if number == 1 else command, timeout_s=timeout_s, threads=1)
        lines = [line for line in finished.stdout.splitlines() if line.startswith(REPORT_PREFIX)]
        if finished.problem is not None or not lines:
            problems.append(f"overhead on {number}: {finished.problem or 'no report'}")
            continue
        found.append(Overhead(**json.loads(lines[0].removeprefix(REPORT_PREFIX))))
        _say(results.render_overhead(found[-1]))
    return found, problems


def describe_sitting(args: argparse.Namespace) -> dict[str, object]:
    """The settings of this sitting; warns of a machine that has something else to do."""
    before = load()
    if before > MOST_LOAD:
        _say(f"WARNING: this machine is busy (load {before:.1f}); the figures will say little")
    return {**SETTINGS, "rounds": args.repeats, "epochs in a run": args.epochs, "load before": round(before, 1)}


def summarise(
    args: argparse.Namespace,
    settings: dict[str, object],
    runs: list[Run],
    overheads: list[Overhead],
    problems: list[str],
) -> bool:
    """Writes the JSON and prints the table; returns whether all results are right."""
    problems += [f"{one.contestant} on {one.ranks}, round {one.round}: {one.problem}" for one in runs if one.problem]
    problems += [f"WRONG: {difference}" for difference in differing_losses(runs)]
    rows = results.make_rows(runs)
    targets = results.make_targets(runs, overheads, results.tutorial_step_us(runs, BATCH_SIZE))
    machine = describe_machine()
    content = {
        "machine": machine,
        "settings": settings,
        "table": [asdict(row) for row in rows],
        "targets": [{**asdict(target), "met": target.met} for target in targets],
        "overhead": [asdict(overhead) for overhead in overheads],
        "problems": problems,
        "runs": [asdict(one) for one in runs],
    }
    args.json.write_text(json.dumps(content, indent=2) + "\n")
    print(", ".join(f"{name} {fact}" for name, fact in machine.items()))
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print(f"\n{results.render_rows(rows)}\n")
    for overhead in overheads:
        print(results.render_overhead(overhead))
    print(f"\n{results.render_targets(targets)}")
    for problem in problems:
        print(f"FAILED: {problem}")
    return not problems


def main() -> int:
    report_failures()
    args = parse_args()
    interrupt_on(*INTERRUPTS)
    folder = mnist_folder(args.data_dir.resolve())
    check_writable(args.json)
    settings = describe_sitting(args)
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as work:
        decompress_mnist(folder, Path(work, "plain"))
        course = Course(
            data_dir=args.data_dir.resolve(),
            plain_data_dir=Path(work, "plain"),
            work_dir=Path(work),
            epochs=args.epochs,
            timeout_s=args.timeout,
        )
        runs = run_rounds(args, course)
    overheads, problems = ([], []) if args.no_overhead else measure_overheads(args.ranks, args.timeout)
    return 0 if summarise(args, settings, runs, overheads, problems) else 1


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
