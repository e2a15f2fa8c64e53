"""Measures how long a job of two ranks on this host takes to start, by launcher.

python -m benchmarks.startup --data-dir data

Two moments are measured, in seconds from the command: when the slowest rank is ready, and when the command has ended.
Ready is, as the row says, when ranks have joined one another, or when the first step of examples/mnist.py has been
taken; such a run ends after one step and an evaluation. The commands take turns, round after round.

The time of `import torch` is a floor for all that use PyTorch. Two ranks import it at once, so that it takes longer
where they share cores or a disk.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launching import run
from benchmarks.machine import describe_machine, load
from measuring import INTERRUPTS, interrupt_on, parser_of
from trainer.errors import TrainerError
from trainer.watch.failure import report_failures

_TIMEOUT_S = 120.0
# `date` stamps a command's beginning and end, because what cleans up after it takes time as well.
_STAMPED = 'date "+startup-began: %s.%N"; "$@"; code=$?; date "+startup-ended: %s.%N"; exit $code'
_STAMP = re.compile(r"startup-(began|ready|ended): (\d+\.\d+)")
_READY = "import time; print(f'startup-ready: {time.time()}\\n', end='', flush=True)"
_INIT_HOROVOD = f"import horovod.torch as hvd; hvd.init(); {_READY}"
_INIT_GLOO = (
    f"import torch.distributed as dist; dist.init_process_group('gloo'); {_READY}; dist.destroy_process_group()"
)
_HOROVODRUN = ["horovodrun", "-np", "2", "-H", "localhost:2"]
_TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job, in seconds from the command."""

    ready_s: float | None
    """Until the slowest rank was ready; None where the command has no such moment."""
    ended_s: float
    """Until the command had ended."""


def commands(dataset: str, data_dir: Path, timing: Path) -> dict[str, list[str]]:
    """The commands to compare, by the name of their row. `timing` is a file that may be written."""
    python = [sys.executable, "-c"]
    one_step = [sys.executable, "scripts/timed.py", "--steps", "1", str(timing)]
    example = ["-m", "benchmarks.first_step", "--epochs", "1", "--output", "none"]
    example = [*one_step, *example, "--dataset", dataset, "--data-dir", str(data_dir)]
    return {
        "python, import torch": [*python, "import torch"],
        "horovodrun, hvd.init": [*_HOROVODRUN, *python, _INIT_HOROVOD],
        "torchrun, init_process_group": [*_TORCHRUN, *python, _INIT_GLOO],
        "horovodrun, first step": [*_HOROVODRUN, *example],
        "horovodrun --gloo, first step": [*_HOROVODRUN, "--gloo", *example],
    }


def measure(name: str, command: Sequence[str]) -> Start:
    """Start a job once.

    Raises:
        TrainerError: the command failed.
    """
    finished = run(["sh", "-c", _STAMPED, "sh", *command], timeout_s=_TIMEOUT_S)
    if finished.problem is not None:
        raise TrainerError(f"{name}: {finished.problem}")
    return read_start(finished.stdout)


def read_start(stdout: str) -> Start:
    """Read the stamps of one start. Where several ranks were ready, the last one counts."""
    stamps: dict[str, float] = {}
    for moment, seconds in _STAMP.findall(stdout):
        stamps[moment] = max(stamps.get(moment, 0.0), float(seconds))
    ready = stamps.get("ready")
    return Start(ready_s=None if ready is None else ready - stamps["began"], ended_s=stamps["ended"] - stamps["began"])


def table(starts: dict[str, list[Start]]) -> str:
    """Format the medians of all starts as a table in Markdown, a command per row."""
    lines = ["| command | ready, s | ended, s |", "|---|---|---|"]
    for name, found in starts.items():
        ready = [start.ready_s for start in found if start.ready_s is not None]
        ended = statistics.median(start.ended_s for start in found)
        lines.append(f"| {name} | {f'{statistics.median(ready):.2f}' if ready else ''} | {ended:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    names = list(commands("mnist", Path(), Path()))
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "digits"], help="(default: %(default)s)")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="ROW", help="(default: all rows)")
    args = parser.parse_args(arguments)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), f"load {load():.1f}", sep="; ")
    starts: dict[str, list[Start]] = {name: [] for name in args.only}
    with tempfile.TemporaryDirectory(prefix="trainer-startup-") as folder:
        rows = commands(args.dataset, args.data_dir.resolve(), Path(folder, "timing.jsonl"))
        for _ in range(args.repeats):
            for name, found in starts.items():
                found.append(measure(name, rows[name]))
    print(table(starts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
