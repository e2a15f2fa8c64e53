"""Performance models: predict the exchange and the step time of one shape from measurements of another.

An all-reduce of K bytes between two ranks sends two messages of K/2 in each direction, whatever the algorithm. Its time
is measured for several K. Other shapes follow from the number of messages and their sizes; where a step of an algorithm
uses links within a host and between hosts, the slower one counts. The formulas are those of the cited sources, but a
message's time is looked up in the measurements instead of a fitted A + B·K: protocols change with the message size, and
a TCP connection needs time to reach its speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from trainer.tuning.open_mpi import ring_from_bytes

NETWORK_BOUND_RATIO = 3.0
"""A link between hosts is the bottleneck where it is this many times slower than memory; otherwise the cores are."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A number of hosts, and a number of ranks on each."""

    hosts: int
    per_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.per_host}"


@dataclass(frozen=True)
class Link:
    """Measured time of an all-reduce between two ranks.

    Args:
        points: pairs of bytes and seconds, sorted by size.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Return the time for a size, interpolated linearly, and extrapolated beyond the largest measured size."""
        (low, least), *rest = self.points
        if size <= low or not rest:
            return least
        for high, most in rest:
            if size <= high:
                break
            low, least = high, most
        else:
            (low, least), (high, most) = self.points[-2:]
        return max(0.0, least + (most - least) * (size - low) / (high - low))

    @property
    def latency_s(self) -> float:
        """Return the time of the smallest message."""
        return self.points[0][1]

    @property
    def s_per_byte(self) -> float:
        """Return the additional time per byte, from the smallest to the largest message."""
        (low, least), (high, most) = self.points[0], self.points[-1]
        return max(0.0, (most - least) / (high - low)) if high > low else 0.0

    @property
    def gbit_per_s(self) -> float:
        """Return the bandwidth in each direction: a rank sends and receives K bytes in an all-reduce of two."""
        return 8e-9 / self.s_per_byte if self.s_per_byte > 0 else math.inf

    def slowed(self, factor: float) -> Link:
        """Return a link that takes `factor` times as long."""
        return Link(tuple((size, seconds * factor) for size, seconds in self.points))


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links between two ranks, measured with one transport; None where no shape uses the link."""

    local: Link | None = None
    """Within a host."""
    remote: Link | None = None
    """Between two hosts."""
    one_way: Link | None = None
    """Between two hosts in a ring of more than two ranks, where each connection carries data in one direction only;
    None where it has not been measured separately."""

    def links(self, shape: Shape) -> tuple[Link, Link]:
        """Return the links within a host and between hosts; each replaces the other where that was not measured."""
        known = self.remote or self.local
        if known is None:
            raise ValueError("no link has been measured")
        remote = known if shape.hosts > 1 else self.local or known
        return self.local or known, remote

    def loaded(self, size: float, slowdown: float) -> Network:
        """Return the network as seen from cores that are oversubscribed by a factor, for an exchange of `size` bytes.

        Only links that are limited by the cores slow down.
        """
        across = 1.0 if is_network_bound(self, size) else slowdown
        local, remote, one_way = (
            link.slowed(factor) if link else None
            for link, factor in ((self.local, slowdown), (self.remote, across), (self.one_way, across))
        )
        return Network(local=local, remote=remote, one_way=one_way)


def link_from_ring(ring_times: Link, ranks: int) -> Link:
    """Return the link between two ranks, from the all-reduce times of a ring of more ranks."""
    # The messages are the same, but a ring of N ranks sends N - 1 times as many of them.
    return Link(tuple((2 * size / ranks, seconds / (ranks - 1)) for size, seconds in ring_times.points))


def ring(size: float, shape: Shape, network: Network) -> float:
    """Return the time of a ring: 2·(N - 1) messages of K/N bytes, at the slowest link's speed.

    Patarasuk and Yuan, JPDC 2009.
    """
    local, remote = network.links(shape)
    n = shape.ranks
    if shape.hosts > 1 and n > 2:
        remote = network.one_way or remote
    links = [remote, local] if shape.per_host > 1 else [remote]
    return (n - 1) * max(link.seconds(2 * size / n) for link in links)


def tree(size: float, shape: Shape, network: Network) -> float:
    """Return the time of recursive halving and doubling: 2·log2(N) messages.

    Rabenseifner's algorithm, in Thakur, Rabenseifner and Gropp, IJHPCA 2005. Ranks of one host are neighbours and
    exchange the large halves first. Then all P ranks of a host send K/P each over the link between hosts, at the same
    time.
    """
    local, remote = network.links(shape)
    left, seconds = size, 0.0
    for _ in range(math.ceil(math.log2(shape.per_host))):
        seconds += local.seconds(left)
        left /= 2
    for _ in range(math.ceil(math.log2(shape.hosts))):
        seconds += remote.seconds(left) + (shape.per_host - 1) * left * remote.s_per_byte
        left /= 2
    return seconds


def hierarchical(size: float, shape: Shape, network: Network) -> float:
    """Return the time of a reduction within each host, a ring of the hosts, and a broadcast within each host.

    Goyal et al., arXiv:1706.02677, section 4.
    """
    local, remote = network.links(shape)
    p, m = shape.per_host, shape.hosts
    return (p - 1) * local.seconds(2 * size / p) + (m - 1) * remote.seconds(2 * size / m)


def parameter_server(size: float, shape: Shape, network: Network) -> float:
    """Return the time with one server on rank 0's host, whose link carries K bytes each way for each remote rank.

    Li et al., OSDI 2014, section 2. With one server per shard, divide by the number of servers.
    """
    local, remote = network.links(shape)
    elsewhere = shape.ranks - shape.per_host
    inside = local.seconds(size) + size * local.s_per_byte * (shape.ranks / 2 - 1)
    across = remote.seconds(size) + size * remote.s_per_byte * (elsewhere - 1)
    return max(inside, across) if elsewhere else inside


MODELS: dict[str, Callable[[float, Shape, Network], float]] = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "parameter server": parameter_server,
}
_OF_STRATEGY = {"ddp": "ring", "ring": "ring", "parameter_server": "parameter server"}


def model_of(strategy: str, size: float, shape: Shape) -> str:
    """Return the name of the model for a strategy. Gloo uses a ring; Horovod uses MPI, which `trainer.tuning` sets."""
    if strategy != "horovod":
        return _OF_STRATEGY[strategy]
    return "ring" if shape.hosts > 1 and shape.ranks > 2 and size >= ring_from_bytes(shape.ranks) else "tree"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank on its share of the cores, without an exchange: mean seconds of a step."""

    input: float
    compute: float
    window: float
    """Part of the compute time that an exchange in several messages can overlap with."""
    gradient_bytes: int
    messages: int = 1
    """Buckets that the gradients are sent as."""
    step_groups: tuple[float, ...] = ()
    """Distribution of the step's seconds: means of groups of equal size, sorted."""
    accumulate: float = 1.0
    """Steps for each exchange."""

    def expected_wait(self, ranks: int) -> float:
        """Return the mean time that a rank waits for the slowest of so many, in seconds.

        It is the expected maximum of N steps less the mean step. The maximum of N independent values has the N-th power
        of their distribution function (David and Nagaraja, Order Statistics, section 2.1). Disturbances that affect all
        ranks of a host at once are not independent, so they make this too large.
        """
        if not self.step_groups:
            return 0.0
        count = len(self.step_groups)
        weights = (((at + 1) / count) ** ranks - (at / count) ** ranks for at in range(count))
        slowest = sum(weight * seconds for weight, seconds in zip(weights, self.step_groups, strict=True))
        return slowest - fmean(self.step_groups)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds of a step."""

    shape: Shape
    model: str
    compute: float
    """Includes input."""
    exchange: float
    """Whole exchange."""
    exposed: float
    """Part of the exchange that does not overlap with compute."""
    waiting: float = 0.0
    """Waiting for the slowest rank."""

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.waiting


def predict(
    rank: Rank,
    shape: Shape,
    network: Network,
    model: str,
    *,
    threads_per_core: float = 1.0,
    together: float | None = None,
) -> Prediction:
    """Predict a step on `shape` from a rank without an exchange, and the network.

    Args:
        rank: by itself, or beside as many others as a machine of the shape computes with at once.
        threads_per_core: computing threads per core. Above 1 the cores are oversubscribed, and each thread takes that
            much longer. Below 1 there are free cores.
        together: measured seconds of a step's computing and its exchange, one after the other, on this shape. What it
            has beyond the two is waiting: for the slowest rank, and for time slices.
    """
    slowdown = max(1.0, threads_per_core)
    compute = (rank.input + rank.compute) * slowdown
    exchange = 0.0
    if shape.ranks > 1:
        exchange = MODELS[model](rank.gradient_bytes, shape, network.loaded(rank.gradient_bytes, slowdown))
    window = rank.window * slowdown if hides_exchange(network, rank, threads_per_core) else 0.0
    exposed = max(exchange / rank.messages, exchange - window) / rank.accumulate
    exchange /= rank.accumulate
    if together is not None:
        exposed = min(exposed, max(0.0, together - compute))
        waiting = max(0.0, together - compute - exposed)
    else:
        # Assumes that ranks which share a core finish together, so there are fewer to wait for, and that their
        # variations add up like independent noise. Time spent waiting for a time slice is not modelled.
        waiting = math.sqrt(slowdown) * rank.expected_wait(max(1, round(shape.ranks / slowdown)))
    return Prediction(shape=shape, model=model, compute=compute, exchange=exchange, exposed=exposed, waiting=waiting)


def hides_exchange(network: Network, rank: Rank, threads_per_core: float) -> bool:
    """Return whether the backward pass hides a part of the exchange of a rank's gradients."""
    # A single message is sent after the last gradient, so it cannot overlap with compute. A network-bound exchange
    # leaves the cores to compute. One that needs cores overlaps only where a core is free.
    return rank.messages > 1 and (threads_per_core < 1 or is_network_bound(network, rank.gradient_bytes))


def is_network_bound(network: Network, size: float) -> bool:
    """Return whether the link between hosts, not the cores, limits an exchange of so many bytes."""
    local, remote = network.local, network.remote
    return bool(local and remote and remote.seconds(size) > NETWORK_BOUND_RATIO * local.seconds(size))
