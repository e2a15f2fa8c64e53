"""Measures what checkpoints cost: ours, `torch.save` in the loop, and torch.distributed.checkpoint (DCP).

python -m benchmarks.checkpoints --data-dir data

One job per number of ranks trains in blocks of so many updates, with checkpoints made in one way in each. The blocks
take turns in rounds; every other round runs in reverse order. All figures are rank 0's. The stall is what a checkpoint
keeps the training waiting; "x copy" divides it by what copying the same tensors into host memory takes in the same
loop, the least that a consistent checkpoint can take. "Updates meanwhile" compares updates during which a checkpoint
was being written with those without one, in the same blocks.

What a checkpoint costs in all is (seconds of a block with checkpoints - seconds of the same round's block without) /
number of checkpoints; the block's seconds include what is still to be written at its end. From this follows the
overhead at one checkpoint a minute. Ratios and differences are taken within a round, then their median.

A DCP checkpoint is kept; ours removes old ones beside the training, which counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.checkpoint_loop import Block, add_options
from benchmarks.checkpoint_savers import COPY, NONE, SAVERS
from benchmarks.common import REPORT_PREFIX
from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine, load
from benchmarks.workloads import BATCH_SIZE
from trainer.errors import TrainerError
from trainer.files import check_writable, write_atomically
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.watch.failure import report_failures

_HEAD = (
    *("ranks", "saved by", "stall, ms", "× copy", "written after, s", "updates meanwhile", "samples/s"),
    *("overhead", "a checkpoint costs, s", "at one a minute"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of saving on so many ranks: medians over the rounds."""

    ranks: int
    saver: str
    samples_per_s: float
    stall_s: tuple[float, float, float] | None
    """Median, least and most over all checkpoints; None where nothing is saved, as in all of the rest."""
    times_copy: float | None
    write_s: float | None
    meanwhile_percent: float | None
    """By how much updates are slower while a checkpoint is written."""
    overhead_percent: float | None
    """At the benchmark's interval."""
    each_s: float | None
    """What a checkpoint costs in all."""

    @property
    def minute_percent(self) -> float | None:
        """Overhead at one checkpoint a minute."""
        return None if self.each_s is None else 100 * self.each_s / 60


def make_rows(ranks: int, blocks: Sequence[Block], samples: int) -> list[Row]:
    """Return a row for each way of saving.

    Args:
        samples: of all ranks in a block.
    """
    by_saver: dict[str, dict[int, Block]] = {}
    for block in blocks:
        by_saver.setdefault(block.saver, {})[block.round] = block
    return [_row(ranks, name, by_saver, samples) for name in by_saver]


def _row(ranks: int, name: str, by_saver: dict[str, dict[int, Block]], samples: int) -> Row:
    own = by_saver[name]
    stalls = [stall for block in own.values() for stall in block.stalls_s]

    def paired(other: str, value: Callable[[Block, Block], float]) -> float | None:
        pairs = [(block, by_saver[other][number]) for number, block in own.items()] if other in by_saver else []
        return statistics.median(value(*pair) for pair in pairs) if stalls and pairs else None

    slower = [100 * (one.meanwhile_s / one.update_s - 1) for one in own.values() if one.meanwhile_s is not None]
    return Row(
        ranks=ranks,
        saver=name,
        samples_per_s=samples / statistics.median(block.seconds for block in own.values()),
        stall_s=(statistics.median(stalls), min(stalls), max(stalls)) if stalls else None,
        times_copy=paired(COPY, lambda one, copy: statistics.median(one.stalls_s) / statistics.median(copy.stalls_s)),
        write_s=statistics.median(write for one in own.values() for write in one.writes_s) if stalls else None,
        meanwhile_percent=statistics.median(slower) if slower else None,
        overhead_percent=paired(NONE, lambda one, none: 100 * (one.seconds / none.seconds - 1)),
        each_s=paired(NONE, lambda one, none: (one.seconds - none.seconds) / len(one.stalls_s)),
    )


def table(rows: Sequence[Row]) -> str:
    """Format all rows as a table in Markdown."""
    lines = [_HEAD, ("---",) * len(_HEAD), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.ranks),
        SAVERS[row.saver][0],
        "{:.1f} ({:.1f} – {:.1f})".format(*(1000 * stall for stall in row.stall_s)) if row.stall_s else "",
        _format("{:.2f}", row.times_copy),
        "" if row.saver == COPY else _format("{:.2f}", row.write_s),
        _format("{:+.0f} %", row.meanwhile_percent),
        f"{row.samples_per_s:,.0f}",
        _format("{:+.1f} %", row.overhead_percent),
        _format("{:.3f}", row.each_s),
        _format("{:+.2f} %", row.minute_percent),
    )


def _format(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def measure(ranks: int, options: Sequence[str], timeout_s: float) -> list[Block]:
    """Run one job.

    Raises:
        TrainerError: it failed.
    """
    finished = run([*launch("benchmarks/checkpoint_loop.py", ranks), *options], timeout_s=timeout_s)
    if finished.problem is not None:
        raise TrainerError(f"{ranks} ranks: {finished.problem}")
    (report,) = (line for line in finished.stdout.splitlines() if REPORT_PREFIX in line)
    return [Block(**one) for one in json.loads(report.partition(REPORT_PREFIX)[2])]


def main(arguments: list[str] | None = None) -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="(default: 1 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows and blocks are written here")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="of one job, seconds (default: %(default)s)"
    )
    add_options(parser)
    args = parser.parse_args(arguments)
    if args.repeats < 1 or args.checkpoints < 1 or args.updates < 2:
        parser.error("--repeats and --checkpoints must be at least 1, and --updates at least 2")
    if args.json:
        check_writable(args.json)
    options = [f"--data-dir={args.data_dir.resolve()}", f"--folder={args.folder.resolve()}", "--only", *args.only]
    options += [
        f"--{name}={getattr(args, name)}" for name in ("dataset", "network", "repeats", "updates", "checkpoints")
    ]
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), f"load {load():.1f}", sep="; ")
    rows: list[Row] = []
    blocks: dict[int, list[Block]] = {}
    for ranks in args.ranks:
        blocks[ranks] = measure(ranks, options, args.timeout)
        rows += make_rows(ranks, blocks[ranks], args.updates * args.checkpoints * BATCH_SIZE * ranks)
    print(table(rows), flush=True)
    if args.json:
        raw = {str(ranks): [asdict(block) for block in found] for ranks, found in blocks.items()}
        result = {"machine": describe_machine(), "rows": [asdict(row) for row in rows], "blocks": raw}
        write_atomically(args.json, json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
