"""Results of comm_bench.py as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from measuring import cpu_model
from trainer.cluster.world import World
from trainer.files import write_atomically
from trainer.tuning.host import host_cores

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result for one size on one transport."""

    transport: str
    key: str
    """Name of the transport for `--only`."""
    size: int
    """Payload on each rank, bytes."""
    ranks: int
    operations: int
    """Number of operations in each timed repeat."""
    seconds: float
    """Of one operation, median over the repeats."""
    wrong: int
    """Number of elements that were not the expected sum."""
    bytes_sent: float | None
    """Bytes sent per rank and operation, as the transport counts them; None where it does not."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Return the payload's bytes per second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Return the bytes per second that each link carries under an optimal algorithm, as nccl-tests defines it."""
        return self.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks


TABLE_HEAD = (
    f"{'transport':26} {'bytes':>10} {'time µs':>12} {'algbw GB/s':>11} {'busbw GB/s':>11} {'wrong':>6} "
    f"{'sent per rank':>14}"
)


def describe(world: World, hosts: Sequence[str]) -> dict[str, str]:
    """Return the ranks, the device and the versions of a measurement.

    Args:
        hosts: name of each rank's host.
    """
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu_model()
    return {
        "ranks": f"{world.size} on " + ", ".join(f"{host}: {ranks}" for host, ranks in Counter(hosts).items()),
        "device": f"{device}, {host_cores()} cores, Linux {platform.release()}",
        "versions": f"PyTorch {torch.__version__}, Python {platform.python_version()}",
    }


def table_line(row: Row) -> str:
    """Return a row of the table."""
    sent = "not counted" if row.bytes_sent is None else f"{row.bytes_sent:.0f}"
    return (
        f"{row.transport:26} {row.size:>10} {row.seconds * 1e6:12.1f} {row.algorithm_bandwidth / 1e9:11.3f} "
        f"{row.bus_bandwidth / 1e9:11.3f} {row.wrong:>6} {sent:>14}"
    )


def write_json(path: Path, facts: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write all results as JSON."""
    entries = [{**asdict(row), "algbw": row.algorithm_bandwidth, "busbw": row.bus_bandwidth} for row in rows]
    write_atomically(
        path, json.dumps({"where": dict(facts), "unit": "bytes, seconds, bytes/s", "rows": entries}, indent=1)
    )


def plot(path: Path, facts: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Draw time and bus bandwidth against size, on logarithmic scales, with one curve per transport."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for transport in dict.fromkeys(row.transport for row in rows):
        of_transport = [row for row in rows if row.transport == transport]
        sizes = [row.size for row in of_transport]
        left.plot(sizes, [row.seconds * 1e6 for row in of_transport], marker="o", markersize=3, label=transport)
        right.plot(sizes, [row.bus_bandwidth / 1e9 for row in of_transport], marker="o", markersize=3)
    left.set(title="Time of one all-reduce (lower is better)", ylabel="µs")
    right.set(title="Bus bandwidth (higher is better)", ylabel="GB/s")
    ticks = [4**power for power in range(1, 15, 2)]
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="payload per rank")
        axes.set_xticks(ticks, [_short(size) for size in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"float32, in place, ranks: {facts['ranks']}; {facts['device']}", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _short(size: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"
