"""Compares the library with plain Horovod, DDP, Lightning Fabric, Accelerate and the limit of this machine.

python benchmarks/compare.py --data-dir data

All contestants train the tutorial network on MNIST (batch 100 per rank, SGD with learning rate 0.01 and momentum 0.5),
and a transformer of 1.1 million parameters on Python's own standard library (4 × 128 bytes per rank, AdamW). They do so
on one rank, bound to one core, and on two (4 and 8 by an option), with one thread per rank. They take turns in rounds;
every other round runs in reverse order. The first epoch of each run is discarded. Evaluation is not counted.

The limit on several ranks is the same loop without the exchange of gradients: ranks that compute side by side. Targets
(see results.py) are: ours reaches 95 % of the limit, is not behind any peer, and our layer costs at most 20 µs a step.
Ours is behind a peer when the whole interquartile range of the rounds' ratios (our seconds / its seconds) is above 1;
fewer than three rounds are not judged.

Exits with code 1 when a run failed or trained wrongly. A missed target is no failure.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.common import REPORT_PREFIX
from benchmarks.contestants import CONTESTANTS, ON_DDP, Run, RunSettings, differing_losses, start
from benchmarks.launching import has_peers, launch, on_one_core, run
from benchmarks.machine import describe_machine, load
from benchmarks.overhead import Overhead
from benchmarks.workloads import TUTORIAL, WORKLOADS, mnist_folder
from examples.datasets.mnist import FILES
from trainer.files import check_writable
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.watch.failure import report_failures

MOST_LOAD = 0.5
"""Above this load average the machine counts as busy."""


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `--help` shows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="per run (default: %(default)s)")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("bench.json"),
        metavar="FILE",
        help="results and raw runs (default: %(default)s)",
    )
    names = list(dict.fromkeys(name for named in CONTESTANTS.values() for name in named))
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="(default: all)")
    networks = list(CONTESTANTS)
    parser.add_argument("--networks", nargs="+", default=networks, choices=networks, help="(default: all)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], choices=[1, 2, 4, 8], help="(default: 1 2)")
    parser.add_argument("--no-overhead", action="store_true", help="leave out the cost of our layer per step")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="of one run, seconds (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    if not has_peers():
        left_out = [name for name in args.only if name in ON_DDP]
        args.only = [name for name in args.only if name not in ON_DDP]
        if left_out:
            _say(f"without {' and '.join(left_out)}, which `make bench` or scripts/install/peers.py installs")
    args.networks = [
        name for name in networks if name in args.networks and not CONTESTANTS[name].keys().isdisjoint(args.only)
    ]
    if not args.networks:
        parser.error("no contestant is left")
    if args.epochs < 2:
        parser.error(f"--epochs is {args.epochs}; it must be at least 2, because the first one is discarded")
    return args


def decompress_mnist(folder: Path, root: Path) -> None:
    """Write MNIST's files, decompressed, to MNIST/raw under `root`, as torchvision requires."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in [name for pair in FILES.values() for name in pair]:
        if (folder / name).exists():
            (raw / name).symlink_to((folder / name).resolve())
        else:
            with gzip.open(folder / f"{name}.gz") as source, (raw / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def run_rounds(args: argparse.Namespace, settings: RunSettings) -> list[Run]:
    """Run every contestant once a round, every other round in reverse; print a line on stderr for each run."""
    order = [
        (network, name, ranks)
        for network in args.networks
        for ranks in dict.fromkeys(args.ranks)
        for name in CONTESTANTS[network]
        if name in args.only
    ]
    runs: list[Run] = []
    for number in range(args.repeats):
        for network, name, ranks in order if number % 2 == 0 else order[::-1]:
            started = time.monotonic()
            found = start(network, name, ranks, number, settings)
            runs.append(found)
            result = found.problem or f"{results.epoch_seconds(found):.2f} s/epoch"
            _say(
                f"[{len(runs)}/{len(order) * args.repeats}] {network}: {name} on {ranks}: {result} "
                f"(run {time.monotonic() - started:.0f} s, load {load():.1f})"
            )
    return runs


def measure_overheads(ranks: Sequence[int], timeout_s: float) -> tuple[list[Overhead], list[str]]:
    """Run overhead.py on each number of ranks; return its results, and what went wrong."""
    found, problems = [], []
    for number in dict.fromkeys(ranks):
        command = launch("benchmarks/overhead.py", number)
        finished = run(on_one_core(command) if number == 1 else command, timeout_s=timeout_s, threads=1)
        lines = [line for line in finished.stdout.splitlines() if line.startswith(REPORT_PREFIX)]
        if finished.problem is not None or not lines:
            problems.append(f"overhead on {number}: {finished.problem or 'no report'}")
            continue
        found.append(Overhead(**json.loads(lines[0].removeprefix(REPORT_PREFIX))))
        _say(tables.render_overhead(found[-1]))
    return found, problems


def describe_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings of this benchmark; warn when the machine is busy."""
    before = load()
    if before > MOST_LOAD:
        _say(f"WARNING: this machine is busy (load {before:.1f}); the figures will be unreliable")
    return {
        "threads per rank": 1,
        "rounds": args.repeats,
        "epochs in a run": args.epochs,
        "load before": round(before, 1),
    }


def summarise(
    args: argparse.Namespace,
    settings: dict[str, object],
    runs: list[Run],
    overheads: list[Overhead],
    problems: list[str],
) -> str:
    """Write the JSON; return the tables as text."""
    machine = describe_machine()
    content: dict[str, Any] = {
        "machine": machine,
        "settings": settings,
        "networks": {},
        "overhead": [asdict(overhead) for overhead in overheads],
        "problems": problems,
        "runs": [asdict(one) for one in runs],
    }
    parts = [f"{_in_words(machine)}\n{_in_words(settings)}"]
    for network in args.networks:
        of_network = [one for one in runs if one.network == network]
        found, text = summarise_network(network, of_network, overheads, judged=network == args.networks[0])
        content["networks"][network] = found
        parts.append(text)
    parts += [tables.render_overhead(overhead) for overhead in overheads]
    args.json.write_text(json.dumps(content, indent=2) + "\n")
    return "\n\n".join(parts)


def summarise_network(
    network: str, runs: list[Run], overheads: list[Overhead], *, judged: bool
) -> tuple[dict[str, Any], str]:
    """Return a network's tables for the JSON, and as text.

    Args:
        judged: whether the overhead, which has a network of its own, is among the targets here.
    """
    workload = WORKLOADS[network]
    rows, limits = results.make_rows(runs), results.make_limits(runs)
    targets = results.make_targets(runs, overheads if judged else [], len(os.sched_getaffinity(0)))
    facts = results.make_facts(runs, overheads)
    found: dict[str, Any] = {"settings": workload.settings}
    for name, values in (("table", rows), ("limits", limits), ("targets", targets), ("information", facts)):
        found[name] = [asdict(value) for value in values]
    parts = [f"{network} network: {_in_words(workload.settings)}", tables.render_rows(rows, workload.items[1])]
    parts += [tables.render_limit(limit) for limit in limits]
    parts += [tables.render_targets(targets), tables.render_facts(facts)]
    return found, "\n\n".join(part for part in parts if part)


def _in_words(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def find_problems(runs: list[Run]) -> list[str]:
    """Describe the runs that failed, and those whose losses differ from ours where they must not."""
    failed = [
        f"{one.network}: {one.contestant} on {one.ranks}, round {one.round}: {one.problem}"
        for one in runs
        if one.problem
    ]
    return failed + [f"WRONG: {difference}" for difference in differing_losses(runs)]


def main() -> int:
    report_failures()
    args = parse_args()
    interrupt_on(*INTERRUPTS)
    folder = mnist_folder(args.data_dir.resolve()) if TUTORIAL in args.networks else None
    check_writable(args.json)
    settings = describe_settings(args)
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as work:
        if folder is not None:
            decompress_mnist(folder, Path(work, "plain"))
        run_settings = RunSettings(
            data_dir=args.data_dir.resolve(),
            plain_data_dir=Path(work, "plain"),
            work_dir=Path(work),
            epochs=args.epochs,
            timeout_s=args.timeout,
        )
        runs = run_rounds(args, run_settings)
    overheads, problems = ([], []) if args.no_overhead else measure_overheads(args.ranks, args.timeout)
    problems += find_problems(runs)
    print(summarise(args, settings, runs, overheads, problems))
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
