"""Compares the library with its peers on a machine that others use too: beside processes that take a core each.

    python scripts/install/peers.py
    python -m benchmarks.busy --data-dir data
    python -m benchmarks.busy --data-dir data --hosts 2    # as root

Ranks, networks and contestants are those of compare.py. Two hosts are network namespaces of this machine (two_hosts.py)
with half of the ranks each. In each round, every contestant trains beside each number of busy processes, one contestant
after the other, every other round in reverse; so a ratio compares runs that follow one another. A busy process is a
loop that never sleeps, of the same priority as a rank; all are in this program's session. The first epoch of each run
is discarded.

Prints a table in Markdown for each network: medians over the rounds, and how many times a peer's seconds ours are.
Exits with code 1 when a run failed or trained wrongly.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks.contestants import CONTESTANTS, DDP, ON_DDP, OURS, Run, RunSettings, differing_losses, start
from benchmarks.launching import has_peers
from benchmarks.machine import describe_machine, load
from benchmarks.results import epoch_seconds
from benchmarks.two_hosts import hosts
from benchmarks.workloads import TUTORIAL, mnist_folder
from measuring import INTERRUPTS, interrupt_on, parser_of
from trainer.watch.failure import report_failures

BUSY = [sys.executable, "-S", "-c", "while True: pass"]
_NAMES = (OURS, DDP, *ON_DDP)

Beside = dict[int, list[Run]]
"""Runs by the number of busy processes beside them."""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Context beside so many processes that never sleep."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_rounds(args: argparse.Namespace, network: str, settings: RunSettings) -> Beside:
    """Run every contestant of a network once a round and condition; print a line on stderr for each run."""
    found: Beside = {count: [] for count in args.conditions}
    for number in range(args.rounds):
        for count, runs in found.items():
            for name in args.only if number % 2 == 0 else args.only[::-1]:
                with busy_processes(count):
                    own_folder = replace(settings, work_dir=settings.work_dir / str(count))
                    runs.append(start(network, name, args.ranks, number, own_folder))
                result = runs[-1].problem or f"{epoch_seconds(runs[-1]):.2f} s/epoch"
                text = f"{network}, round {number}, beside {count}: {name}: {result} (load {load():.1f})"
                print(text, file=sys.stderr, flush=True)
    return found


def render(network: str, found: Beside) -> str:
    """Return a table with a row for each condition and contestant."""
    lines = [
        f"| {network}: beside | contestant | s/epoch, median | min – max | ours / its seconds (min – max) |",
        "|---|---|---|---|---|",
    ]
    for count, runs in found.items():
        seconds = {(one.contestant, one.round): epoch_seconds(one) for one in runs if one.problem is None}
        for name in dict.fromkeys(one.contestant for one in runs):
            of_name = {number: value for (other, number), value in seconds.items() if other == name}
            pairs = [(seconds[OURS, number], value) for number, value in of_name.items() if (OURS, number) in seconds]
            ratio = "" if name == OURS or not pairs else _spread([ours / its for ours, its in pairs])
            median, least, most = _of(list(of_name.values())) if of_name else ("failed", "", "")
            title = CONTESTANTS[network][name].title
            lines.append(f"| {_beside(count)} | {title} | {median} | {least} – {most} | {ratio} |")
    return "\n".join(lines)


def _beside(count: int) -> str:
    return {0: "nothing", 1: "one busy process"}.get(count, f"{count} busy processes")


def _of(values: Sequence[float]) -> tuple[str, str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{max(values):.2f}"


def _spread(values: Sequence[float]) -> str:
    median, least, most = _of(values)
    return f"{median} ({least} – {most})"


def main(arguments: list[str] | None = None) -> int:
    report_failures()
    args = _parse_args(arguments)
    interrupt_on(*INTERRUPTS)
    if TUTORIAL in args.networks:
        mnist_folder(args.data_dir.resolve())
    machine = ", ".join(f"{name} {fact}" for name, fact in describe_machine().items())
    print(f"{machine}; load {load():.1f}", flush=True)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="trainer-busy-") as work, _place(args.hosts, Path(work)) as two_hosts:
        settings = RunSettings(
            data_dir=args.data_dir.resolve(),
            plain_data_dir=Path(work),  # which none of these contestants reads
            work_dir=Path(work),
            epochs=args.epochs,
            timeout_s=args.timeout,
            two_hosts=two_hosts,
        )
        for network in args.networks:
            for count, runs in (found := run_rounds(args, network, settings)).items():
                problems += [f"{one.contestant}, beside {count}: {one.problem}" for one in runs if one.problem]
            problems += differing_losses([one for runs in found.values() for one in runs])
            print(f"\n{render(network, found)}", flush=True)
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def _place(number_of_hosts: int, work_dir: Path) -> AbstractContextManager[dict[str, str] | None]:
    """Return a context that yields what each run's environment needs on two hosts, and None on this one."""
    return hosts(work_dir) if number_of_hosts == 2 else nullcontext()


def _parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    networks = list(CONTESTANTS)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--conditions", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="busy processes (default: 0 1 2)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--networks", nargs="+", default=networks, choices=networks, help="(default: all)")
    parser.add_argument("--hosts", type=int, default=1, choices=[1, 2], help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, choices=[2, 4, 8], help="on all hosts together (default: 2 for each host)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="per run (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=list(_NAMES), choices=_NAMES, help="(default: all)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="of one run, seconds (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    args.ranks = args.ranks or 2 * args.hosts
    if args.hosts == 2 and os.geteuid() != 0:
        parser.error("--hosts is 2, whose network namespaces only root may make")
    for name, least in (("rounds", 1), ("epochs", 2)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least {least}")
    if min(args.conditions) < 0:
        parser.error(f"--conditions has {min(args.conditions)}; valid are numbers of processes, from 0")
    if not has_peers() and (left_out := [name for name in args.only if name in ON_DDP]):
        args.only = [name for name in args.only if name not in ON_DDP]
        print(f"without {' and '.join(left_out)}, which scripts/install/peers.py installs", file=sys.stderr)
    return args


if __name__ == "__main__":
    sys.exit(main())
