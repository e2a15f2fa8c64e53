"""Latency and bandwidth of one all-reduce, from 4 B to 256 MB, for every transport that this machine has.

    horovodrun -np 2 python scripts/comm_bench.py
    horovodrun -np 4 -H a:2,b:2 python scripts/comm_bench.py --json comm.json --plot comm.svg
    torchrun --nproc-per-node 2 scripts/comm_bench.py --only gloo parameter_server

Conventions of NVIDIA's nccl-tests (doc/PERFORMANCE.md): `size` is the payload on each rank; `time` is that of one
operation, averaged over the ranks, in a row of them between two barriers, after warming up; algorithm bandwidth is
size / time; bus bandwidth is that times 2·(N - 1)/N, which can be held against the speed of the link whatever N is.
`wrong` counts elements that are not the expected sum, over all ranks. Of several repeats, the median is shown.
GB/s are 10^9 bytes a second. What a rank sends is counted twice: by the transport, where it is ours, and by the kernel,
which sees TCP alone: not the memory through which MPI's ranks of one host, or GPUs, exchange. The JSON file is written
anew after every row, so that an interruption loses one.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from comm.gpu_links import describe_links
from comm.report import PICTURES, Row, describe, plot, table_head, table_line, write_json
from comm.tcp_bytes import tcp_bytes_sent
from comm.transports import TRANSPORTS, Transport
from torch import Tensor

from trainer.errors import ConfigError
from trainer.files import check_writable
from trainer.launch.failure import report_failures
from trainer.launch.network import machine_id
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.world import World, current_world
from trainer.tuning import tune
from trainer.tuning.host import share_machine

# A row of operations shall last this long, within these numbers of them.
_ROW_S = 0.2
_FEWEST, _MOST = 3, 1000
_LONG_S = 1.0
"""An operation that takes so long is not made several times in a row: what disturbs it is averaged out by itself."""
_WARM_UP = 3
_SETTLE_S = 0.02
"""After which what an operation has left in the sockets is on its way, but for links below about 100 Mbit/s."""


def main() -> int:
    report_failures()
    options = _parse_args()
    world = current_world(options.device)
    for file in filter(None, (options.json, options.plot) if world.is_root else ()):
        check_writable(file)
    tune(world)
    torch.set_num_threads(1)
    rendezvous = Rendezvous(world)
    machine_ids = rendezvous.all_gather(machine_id())
    rows: list[Row] = []
    facts = describe(world, rendezvous.all_gather(world.host))
    if world.is_root:
        _say("\n".join([*(f"# {name}: {fact}" for name, fact in facts.items()), *_links(world), table_head()]))
        if options.json:
            write_json(options.json, facts, rows)
    for name in options.only:
        for row in _measure(name, world, rendezvous, options, machine_ids):
            rows.append(row)
            if world.is_root and options.json:
                write_json(options.json, facts, rows)
    if world.is_root and options.plot and rows:
        plot(options.plot, facts, rows)
    rendezvous.all_gather("done")
    rendezvous.close()
    return 1 if any(row.wrong for row in rows) else 0


def _measure(
    name: str, world: World, rendezvous: Rendezvous, options: argparse.Namespace, machine_ids: list[str]
) -> Iterator[Row]:
    """Joins one transport, and yields a row for each size; the ranks agree on whether it can be had.

    Args:
        machine_ids: of each rank; several containers may be on one.
    """
    transport, problem = None, ""
    try:
        transport = TRANSPORTS[name](world, rendezvous)
    except (ConfigError, ImportError) as error:
        problem = str(error) or type(error).__name__
    problems = [one for one in rendezvous.all_gather(problem) if one]
    if transport is None or problems:
        if world.is_root:
            _say(f"# {name}: left out: {problems[0]}")
        if transport is not None:
            transport.abandon()
        return
    # As in training: what has just taken its share of a host's cores may be one of several containers on a machine,
    # and threads that wait for each other to be given a core would be all that is measured.
    share_machine(world, machine_ids)
    for size in options.sizes:
        row = _measure_size(name, transport, size, world, rendezvous, options)
        if world.is_root:
            _say(table_line(row))
        yield row
        if row.out_of_place_s > options.max_seconds:
            break
    transport.close()


def _measure_size(
    name: str, transport: Transport, size: int, world: World, rendezvous: Rendezvous, options: argparse.Namespace
) -> Row:
    count = size // 4
    source = torch.zeros(count, device=transport.device)
    result = torch.zeros(count, device=transport.device)
    wrong = _count_wrong(transport, source, result, world)
    operations: tuple[Callable[[], None], ...] = (
        lambda: transport.out_of_place(source, result),
        lambda: transport.in_place(source),
    )
    source.zero_()  # sums of zeros stay zero, however often they are summed up
    sent, over_tcp = _count_sent(transport, source)
    times: list[list[float]] = [[], []]
    for operation in operations:
        _time(operation, transport, _WARM_UP if size < 2**24 else 1)
    trials = [_time(operation, transport, 1) for operation in operations]
    longest = max(float(one) for one in rendezvous.all_gather(str(max(trials))))
    fewest = _FEWEST if longest < _LONG_S else 1
    number = max(fewest, min(_MOST, int(_ROW_S / max(longest, 1e-7))))
    for _ in range(options.repeats):
        for kind, operation in enumerate(operations):
            rendezvous.all_gather("ready")
            own = _time(operation, transport, number)
            times[kind].append(statistics.mean(float(one) for one in rendezvous.all_gather(str(own))))
    return Row(
        transport=transport.name,  # type: ignore[attr-defined]  # each names itself
        key=name,
        size=size,
        ranks=world.size,
        operations=number,
        out_of_place_s=statistics.median(times[0]),
        in_place_s=statistics.median(times[1]),
        wrong=sum(int(one) for one in rendezvous.all_gather(str(wrong))),
        bytes_sent=_mean(sent, rendezvous),
        tcp_bytes=_mean(over_tcp, rendezvous),
    )


def _count_sent(transport: Transport, source: Tensor) -> tuple[int | None, int | None]:
    """Bytes that this rank sends in one operation: by the transport's own count, and over TCP by the kernel's."""
    transport.wait()
    time.sleep(_SETTLE_S)
    before = (transport.bytes_sent, tcp_bytes_sent())
    transport.in_place(source)
    transport.wait()
    time.sleep(_SETTLE_S)
    after = (transport.bytes_sent, tcp_bytes_sent())
    own, kernel = (None if a is None or b is None else b - a for a, b in zip(before, after, strict=True))
    return own, kernel


def _mean(count: int | None, rendezvous: Rendezvous) -> float | None:
    """Over all ranks."""
    counts = rendezvous.all_gather("" if count is None else str(count))
    return statistics.mean(int(one) for one in counts) if all(counts) else None


def _time(operation: Callable[[], None], transport: Transport, number: int) -> float:
    """Seconds of one operation in a row of `number`."""
    transport.wait()
    started = time.perf_counter()
    for _ in range(number):
        operation()
    transport.wait()
    return (time.perf_counter() - started) / number


def _count_wrong(transport: Transport, source: Tensor, result: Tensor, world: World) -> int:
    """Elements that are not the sum, of one operation of each kind. All values are whole, so sums are exact."""
    pattern = torch.arange(source.numel(), device=source.device) % 251
    expected = (pattern * world.size + world.size * (world.size - 1) // 2).float()
    source.copy_(pattern + world.rank)
    transport.out_of_place(source, result)
    transport.wait()
    wrong = int((result != expected).sum())
    transport.in_place(source)
    transport.wait()
    return wrong + int((source != expected).sum())


def _links(world: World) -> list[str]:
    return [f"# {line}" for line in describe_links()] if world.device.type == "cuda" else []


def _say(text: str) -> None:
    # In one piece, which mpirun marks as one.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _bytes(text: str) -> int:
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    number, unit = text.rstrip("BKMGibkmg"), text[len(text.rstrip("BKMGibkmg")) :].upper().rstrip("B").rstrip("I")
    if not number.isdecimal() or unit not in units or int(number) * units[unit] < 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; valid are 4 and more bytes, as in 4, 64K or 256M")
    return int(number) * units[unit] // 4 * 4


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = tuple(TRANSPORTS)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--min-size", type=_bytes, default="4", metavar="SIZE", help="smallest payload (default: 4)")
    parser.add_argument(
        "--max-size", type=_bytes, default="256M", metavar="SIZE", help="largest payload (default: 256M)"
    )
    parser.add_argument("--factor", type=int, default=4, metavar="F", help="from size to size (default: %(default)s)")
    parser.add_argument("--sizes", type=_bytes, nargs="+", metavar="SIZE", help="these instead of that row of sizes")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rows per size (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, default=2.0, metavar="S",
        help="leave a transport's larger sizes out once one operation takes longer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png or .svg; needs matplotlib")
    options = parser.parse_args()
    for name, least in (("factor", 2), ("repeats", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least {least}")
    if options.max_size < options.min_size:
        parser.error(f"--max-size is {options.max_size} bytes, less than --min-size, {options.min_size}")
    if options.plot and options.plot.suffix not in PICTURES:
        parser.error(f"--plot is {options.plot}; valid endings are {', '.join(PICTURES)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install it with `pip install trainer[plots]`")
    if options.sizes:
        return options
    options.sizes = [options.min_size]
    while options.sizes[-1] * options.factor <= options.max_size:
        options.sizes.append(options.sizes[-1] * options.factor)
    return options


if __name__ == "__main__":
    sys.exit(main())
