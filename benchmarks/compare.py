"""Compare the library with plain Horovod, DDP, Lightning Fabric, Accelerate and the limit of this machine.

python benchmarks/compare.py --data-dir data

All contestants train the tutorial network on MNIST (batch 100 per rank, SGD), a transformer of 1.1 million parameters
on Python's own standard library (4 × 128 bytes per rank, AdamW), and ResNet-18 on digits. They do so on one rank, bound
to one core, and on two (4 and 8 by an option), with one thread per rank. They take turns in rounds; every other round
runs in reverse order. The first epoch of each run is discarded. Evaluation is not counted. The limit on several ranks
is the same loop without the exchange of gradients: ranks that compute side by side.

Prints the table of docs/results.md. Draws it beside the file of `--json`, as .svg.

Exits with code 1 when a run failed or trained wrongly.
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
from dataclasses import asdict
from pathlib import Path

from benchmarks import pictures, results
from benchmarks.contestants import CONTESTANTS, ON_DDP, Run, RunSettings, differing_losses, start
from benchmarks.launching import has_peers
from benchmarks.machine import describe_machine, load
from benchmarks.workloads import TUTORIAL, mnist_folder
from examples.datasets.mnist import FILES
from measuring import INTERRUPTS, interrupt_on, parser_of
from trainer.errors import ConfigError
from trainer.watch.failure import report_failures


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `--help` shows it."""
    parser = parser_of(__doc__)
    names, networks = list(dict.fromkeys(name for named in CONTESTANTS.values() for name in named)), list(CONTESTANTS)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    add("--repeats", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    add("--only", nargs="+", default=names, choices=names, help="(default: all)")
    add("--networks", nargs="+", default=networks, choices=networks, help="(default: all)")
    add("--ranks", nargs="+", type=int, default=[1, 2], choices=[1, 2, 4, 8], help="(default: 1 2)")
    add("--timeout", type=float, default=300.0, metavar="S", help="of one run, seconds (default: %(default)s)")
    add("--json", type=Path, default=Path("bench.json"), metavar="FILE", help="all runs (default: %(default)s)")
    args = parser.parse_args(arguments)
    if not has_peers() and (left_out := [name for name in args.only if name in ON_DDP]):
        args.only = [name for name in args.only if name not in ON_DDP]
        _say(f"without {' and '.join(left_out)}, which `make bench` or scripts/install/peers.py installs")
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


def main() -> int:
    report_failures()
    args = parse_args()
    interrupt_on(*INTERRUPTS)
    folder = mnist_folder(args.data_dir.resolve()) if TUTORIAL in args.networks else None
    if not os.access(args.json.absolute().parent, os.W_OK):
        raise ConfigError(f"{args.json} cannot be written; valid is a file in a folder that is there")
    machine = describe_machine() | {"load before": f"{load():.1f}"}
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as work:
        plain = Path(work, "plain")
        if folder is not None:
            decompress_mnist(folder, plain)
        data_dir = args.data_dir.resolve()
        settings = RunSettings(
            data_dir=data_dir, plain_data_dir=plain, work_dir=Path(work), epochs=2, timeout_s=args.timeout
        )
        runs = run_rounds(args, settings)
    failed = [f"{run.network}: {run.contestant} on {run.ranks}, round {run.round}: {run.problem}" for run in runs]
    problems = [text for text, run in zip(failed, runs, strict=True) if run.problem] + differing_losses(runs)
    content = {"machine": machine, "problems": problems, "runs": [asdict(run) for run in runs]}
    args.json.write_text(json.dumps(content, indent=2) + "\n")
    print(", ".join(f"{name} {fact}" for name, fact in machine.items()))
    table = results.table(runs)
    args.json.with_suffix(".svg").write_text(pictures.draw(table))
    print(f"\n{table}\n\n{results.shares(runs)}\n")
    print("\n".join(f"FAILED: {problem}" for problem in problems))
    return 1 if problems else 0


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
