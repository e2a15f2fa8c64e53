"""Measure latency and bandwidth of an all-reduce in place, from 4 B to 256 MB, over every available transport.

    horovodrun -np 2 python scripts/comm_bench.py
    horovodrun -np 4 -H a:2,b:2 python scripts/comm_bench.py --json comm.json --plot comm.svg
    torchrun --nproc-per-node 2 scripts/comm_bench.py --only gloo parameter_server

The columns follow NVIDIA's nccl-tests (doc/PERFORMANCE.md):

    size           payload of each rank, in bytes
    time           of one operation: mean over the ranks and over operations back to back, median over the repeats
    algbw          algorithm bandwidth, size / time; GB/s are 10^9 bytes per second
    busbw          bus bandwidth, algbw · 2·(N - 1)/N: comparable with the link's speed for any number of ranks N
    wrong          number of elements, over all ranks, that are not the expected sum
    sent per rank  bytes sent in one operation, counted by the transport; only this library's transports count them

With --compute-ms each rank computes before each operation, and the time is that of both: where ranks share cores, what
they wait for each other's time slices is in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm.report import PICTURES, TABLE_HEAD, Row, describe, plot, table_line, write_json
from comm.transports import TRANSPORTS, Transport
from torch import Tensor

from trainer.cluster.gpus import describe_sharing, gpu_id
from trainer.cluster.network import machine_id
from trainer.cluster.output import print_line
from trainer.cluster.process_group import join_group
from trainer.cluster.world import World, current_world
from trainer.errors import ConfigError
from trainer.tuning import tune
from trainer.tuning.host import share_machine
from trainer.watch.failure import report_failures

_REPEAT_S = 0.2
"""Target duration of a repeat, which is a number of operations back to back."""
_MIN_OPERATIONS, _MAX_OPERATIONS = 3, 1000
_LONG_OPERATION_S = 1.0
"""From this duration on, a repeat is a single operation, which is long enough for disturbances to average out."""
_WARM_UP_OPERATIONS = 3
_SIDE = 64
"""Of the matrices that are multiplied: a product takes less than a hundredth of a step, and fits a core's cache."""


def main() -> int:
    report_failures()
    options = _parse_options()
    world = current_world(options.device)
    if world.is_root:
        _check_folders(options)
    tune(world)
    torch.set_num_threads(1)
    _, leave = join_group(world)
    machine_ids = _all_gather(machine_id())
    rows: list[Row] = []
    facts = describe(world, _all_gather(world.host))
    if options.compute_ms:
        facts["operation"] = f"{options.compute_ms:g} ms of computing on each rank, then an all-reduce"
    if shared := describe_sharing(_all_gather(gpu_id(world.device))):
        facts["GPUs"] = shared
    if world.is_root:
        print_line("\n".join([*(f"# {name}: {fact}" for name, fact in facts.items()), TABLE_HEAD]))
        if options.json:
            write_json(options.json, facts, rows)
    for name in options.only:
        for row in _measure(name, world, options, machine_ids):
            rows.append(row)
            if world.is_root and options.json:
                write_json(options.json, facts, rows)
    if world.is_root and options.plot and rows:
        plot(options.plot, facts, rows)
    _all_gather("done")
    leave()
    return 1 if any(row.wrong for row in rows) else 0


def _measure(name: str, world: World, options: argparse.Namespace, machine_ids: list[str]) -> Iterator[Row]:
    """Open one transport and yield a row for each size; skip a transport that any rank cannot open.

    Args:
        machine_ids: `machine_id()` of every rank; containers on one machine share it.
    """
    transport, problem = None, ""
    try:
        transport = TRANSPORTS[name](world)
    except (ConfigError, ImportError) as error:
        problem = str(error) or type(error).__name__
    problems = [text for text in _all_gather(problem) if text]
    if transport is None or problems:
        if world.is_root:
            print_line(f"# {name}: left out: {problems[0]}")
        if transport is not None:
            transport.abandon()
        return
    # As in training: a strategy sets its threads for the cores of its host, which may be one of several containers on a
    # machine. With more threads than cores, scheduling would dominate the measurement.
    share_machine(world, machine_ids)
    for size in options.sizes:
        row = _measure_size(name, transport, size, world, options)
        if world.is_root:
            print_line(table_line(row))
        yield row
        if row.seconds > options.max_seconds:
            break
    transport.close()


def _measure_size(name: str, transport: Transport, size: int, world: World, options: argparse.Namespace) -> Row:
    tensor = torch.zeros(size // 4, device=transport.device)
    wrong = _count_wrong(transport, tensor, world)
    tensor.zero_()  # repeated sums of zeros stay zero
    before = transport.bytes_sent
    _time(transport, tensor, 1)
    sent = None if before is None or transport.bytes_sent is None else transport.bytes_sent - before
    _time(transport, tensor, _WARM_UP_OPERATIONS if size < 2**24 else 1)
    compute_s = options.compute_ms / 1e3
    trial_s = _time(transport, tensor, 1, compute_s)
    number = _operations_per_repeat(max(_all_gather(trial_s)))
    times = []
    for _ in range(options.repeats):
        _all_gather("ready")
        seconds_here = _time(transport, tensor, number, compute_s)
        times.append(statistics.mean(_all_gather(seconds_here)))
    counts = _all_gather(sent)
    return Row(
        transport=transport.name,  # type: ignore[attr-defined]  # every subclass sets it
        key=name,
        size=size,
        ranks=world.size,
        operations=number,
        seconds=statistics.median(times),
        wrong=sum(_all_gather(wrong)),
        bytes_sent=None if None in counts else statistics.mean(counts),
    )


def _check_folders(options: argparse.Namespace) -> None:
    """Raise `ConfigError` before the measurement if its results cannot be written."""
    for file in filter(None, (options.json, options.plot)):
        if not os.access(file.absolute().parent, os.W_OK):
            raise ConfigError(f"{file} cannot be written; valid is a file in a folder that is there")


def _all_gather(value: Any) -> list[Any]:
    """Return every rank's value, in the order of the ranks. Collective."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _operations_per_repeat(operation_s: float) -> int:
    least = _MIN_OPERATIONS if operation_s < _LONG_OPERATION_S else 1
    return max(least, min(_MAX_OPERATIONS, int(_REPEAT_S / max(operation_s, 1e-7))))


def _time(transport: Transport, tensor: Tensor, number: int, compute_s: float = 0.0) -> float:
    """Return the mean seconds of computing so long and of one operation, over `number` back to back."""
    transport.wait()
    started = time.perf_counter()
    for _ in range(number):
        _compute(compute_s)
        transport.all_reduce(tensor)
    transport.wait()
    return (time.perf_counter() - started) / number


def _compute(seconds: float) -> None:
    """Multiply matrices until this thread has had a core for so many seconds: other ranks may wait for that core."""
    if seconds:
        matrix, result = torch.ones(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            torch.mm(matrix, matrix, out=result)


def _count_wrong(transport: Transport, tensor: Tensor, world: World) -> int:
    """Return the number of wrong elements after one operation. Values are integers, so sums are exact."""
    pattern = torch.arange(tensor.numel(), device=tensor.device) % 251
    expected = (pattern * world.size + world.size * (world.size - 1) // 2).float()
    tensor.copy_(pattern + world.rank)
    transport.all_reduce(tensor)
    transport.wait()
    return int((tensor != expected).sum())


def _parse_size(text: str) -> int:
    """Return a size in bytes, rounded down to whole float32 values."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    number, unit = text.rstrip("BKMGibkmg"), text[len(text.rstrip("BKMGibkmg")) :].upper().rstrip("B").rstrip("I")
    if not number.isdecimal() or unit not in units or int(number) * units[unit] < 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; valid are 4 bytes and more, as in 4, 64K or 256M")
    return int(number) * units[unit] // 4 * 4


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_options(parser)
    options = parser.parse_args()
    if options.repeats < 1 or options.compute_ms < 0:
        parser.error("--repeats must be at least 1, and --compute-ms not negative")
    if options.plot and options.plot.suffix not in PICTURES:
        parser.error(f"--plot is {options.plot}; valid endings are {', '.join(PICTURES)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install it with `pip install matplotlib`")
    return options


def _add_options(parser: argparse.ArgumentParser) -> None:
    add, names = parser.add_argument, tuple(TRANSPORTS)
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"transports, of {', '.join(names)}")
    add(
        "--sizes", type=_parse_size, nargs="+", default=[4**power for power in range(1, 15)], metavar="SIZE",
        help="payloads (default: 4 16 64 … 256M)",
    )  # fmt: skip
    add("--repeats", type=int, default=3, metavar="N", help="timed repeats for each size (default: %(default)s)")
    add(
        "--max-seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="skip a transport's larger sizes after one that takes longer (default: %(default)s)",
    )
    add("--compute-ms", type=float, default=0.0, metavar="MS", help="computing before each operation (default: 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write all results to this file")
    add("--plot", type=Path, metavar="FILE", help=f"draw a plot ({', '.join(PICTURES)}); needs matplotlib")


if __name__ == "__main__":
    sys.exit(main())
