"""What an exchange costs on other shapes than those on which it was measured, and what a whole step costs then.

An all-reduce of K bytes between two ranks sends, whichever way it is done, two messages of K/2 each way; how long that
takes is measured for several K. Larger shapes follow by counting the messages and their sizes; where ranks of one host
and of several take part, the slower link counts. With a line through the measurements, A + B·K, the formulas are those
of their sources, which are with each; but the time of a message is no line where a protocol changes with its size, or
where a connection has to gather speed, and then the measurement at that size is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from trainer.strategies.bucketed import BUCKET_BYTES
from trainer.tuning.open_mpi import ring_from_bytes

# A link between hosts that is so many times slower than memory is the limit itself; a faster one waits for the cores.
LINK_IS_THE_LIMIT = 3.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """So many processes on each of so many hosts."""

    hosts: int
    per_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.per_host}"


@dataclass(frozen=True)
class Link:
    """How long an all-reduce between two ranks takes, measured.

    Args:
        points: bytes and seconds, by size.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Between two measurements, and beyond the last one, along the line through its neighbours."""
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
        """Of the smallest."""
        return self.points[0][1]

    @property
    def s_per_byte(self) -> float:
        """What the largest takes beyond the smallest."""
        (low, least), (high, most) = self.points[0], self.points[-1]
        return max(0.0, (most - least) / (high - low)) if high > low else 0.0

    @property
    def gbit_per_s(self) -> float:
        """What a rank sends, and receives at the same time: K bytes in an all-reduce between two."""
        return 8e-9 / self.s_per_byte if self.s_per_byte > 0 else math.inf

    def slowed(self, factor: float) -> Link:
        return Link(tuple((size, seconds * factor) for size, seconds in self.points))


@dataclass(frozen=True, kw_only=True)
class Network:
    """What lies between two ranks, as one transport sees it; None where no shape has it."""

    local: Link | None = None
    """On one host."""
    remote: Link | None = None
    """On two."""
    one_way: Link | None = None
    """On two, as larger rings see it, whose neighbours send over a connection in one direction; None where that has
    not been measured apart."""

    def between(self, shape: Shape) -> tuple[Link, Link]:
        """The links of a shape: within a host and across, each standing in where the other has not been measured."""
        known = self.remote or self.local
        if known is None:
            raise ValueError("nothing has been measured")
        remote = known if shape.hosts > 1 else self.local or known
        return self.local or known, remote


def of_ring(line: Link, ranks: int) -> Link:
    """What lies between two ranks, from the times of a ring of more: the same messages, of which it has fewer."""
    return Link(tuple((2 * size / ranks, seconds / (ranks - 1)) for size, seconds in line.points))


def ring(size: float, shape: Shape, network: Network) -> float:
    """2·(N - 1) messages of K/N bytes; the slowest link holds all up. Patarasuk and Yuan, JPDC 2009."""
    local, remote = network.between(shape)
    n = shape.ranks
    if shape.hosts > 1 and n > 2:
        remote = network.one_way or remote
    links = [remote, local] if shape.per_host > 1 else [remote]
    return (n - 1) * max(link.seconds(2 * size / n) for link in links)


def tree(size: float, shape: Shape, network: Network) -> float:
    """Vector halving and distance doubling, then back: 2·log2(N) messages.

    Rabenseifner's, in Thakur, Rabenseifner and Gropp, IJHPCA 2005. Ranks of one host are neighbours and exchange the
    large halves first; what is left for the link between hosts is K/P of every rank, all P of them at the same time.
    """
    local, remote = network.between(shape)
    left, seconds = size, 0.0
    for _ in range(math.ceil(math.log2(shape.per_host))):
        seconds += local.seconds(left)
        left /= 2
    for _ in range(math.ceil(math.log2(shape.hosts))):
        seconds += remote.seconds(left) + (shape.per_host - 1) * left * remote.s_per_byte
        left /= 2
    return seconds


def hierarchical(size: float, shape: Shape, network: Network) -> float:
    """A ring within each host, one of the hosts, one within each again. Goyal et al., arXiv:1706.02677, section 4."""
    local, remote = network.between(shape)
    p, m = shape.per_host, shape.hosts
    return (p - 1) * local.seconds(2 * size / p) + (m - 1) * remote.seconds(2 * size / m)


def parameter_server(size: float, shape: Shape, network: Network) -> float:
    """One server, beside rank 0: its host's link carries K bytes in and out for each rank on another host.

    Li et al., OSDI 2014, section 2; a server for each shard divides it by their number.
    """
    local, remote = network.between(shape)
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
    """What a strategy does with so many bytes: Gloo has a ring, and Horovod leaves it to MPI, as we set that up."""
    if strategy != "horovod":
        return _OF_STRATEGY[strategy]
    return "ring" if shape.hosts > 1 and shape.ranks > 2 and size >= ring_from_bytes(shape.ranks) else "tree"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank by itself, on its share of the cores: seconds of a step."""

    input: float
    compute: float
    window: float
    """Of the compute time, in which an exchange in pieces can go on beside it."""
    gradient_bytes: int
    own: tuple[float, ...] = ()
    """Its steps' seconds, from the quickest to the slowest: means of equally many."""
    accumulate: float = 1.0
    """Steps for each exchange."""

    def waiting(self, ranks: int) -> float:
        """For the slowest of so many, mean: what the largest of N steps is expected to have above the mean.

        The largest of N independent draws has the N-th power of their distribution function (David and Nagaraja, Order
        Statistics, section 2.1). What slows down all ranks of a host at once is not independent, and counts too much.
        """
        if not self.own:
            return 0.0
        pieces = len(self.own)
        chances = (((at + 1) / pieces) ** ranks - (at / pieces) ** ranks for at in range(pieces))
        return sum(chance * seconds for chance, seconds in zip(chances, self.own, strict=True)) - fmean(self.own)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step, from a rank by itself and from the network alone."""

    shape: Shape
    model: str
    compute: float
    """Seconds, input included."""
    exchange: float
    """In all, seconds."""
    exposed: float
    """Of it, what nothing hides."""
    waiting: float = 0.0
    """For the slowest rank."""

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.waiting


def predict(rank: Rank, shape: Shape, network: Network, model: str, *, crowd: float = 1.0) -> Prediction:
    """A step on `shape`.

    Args:
        crowd: threads that compute for each core. Above 1 they share it, and each takes that much longer; below 1
            there are cores to spare.
    """
    slower = max(1.0, crowd)
    compute = (rank.input + rank.compute) * slower
    exchange = 0.0
    if shape.ranks > 1:
        exchange = MODELS[model](rank.gradient_bytes, shape, _crowded(network, rank.gradient_bytes, slower))
    # Up to there all gradients travel as one message, which nothing can hide.
    pieces = max(1, math.ceil(rank.gradient_bytes / BUCKET_BYTES))
    # A link works beside the cores; an exchange that is itself work for the cores hides where one of them is free.
    hides = pieces > 1 and (crowd < 1 or is_slow(network, rank.gradient_bytes))
    window = rank.window * slower if hides else 0.0
    exposed = max(exchange / pieces, exchange - window) / rank.accumulate
    exchange /= rank.accumulate
    # As if ranks that share a core were through together: fewer to wait for, whose unevenness adds up like noise. What
    # they wait for a time slice of the core comes on top, and is not known.
    waiting = math.sqrt(slower) * rank.waiting(max(1, round(shape.ranks / slower)))
    return Prediction(shape=shape, model=model, compute=compute, exchange=exchange, exposed=exposed, waiting=waiting)


def is_slow(network: Network, size: float) -> bool:
    """Whether, for so many bytes, the link between hosts is the limit itself, not the cores that feed it."""
    local, remote = network.local, network.remote
    return bool(local and remote and remote.seconds(size) > LINK_IS_THE_LIMIT * local.seconds(size))


def _crowded(network: Network, size: float, crowd: float) -> Network:
    """The network as ranks see it that wait for a core: what is work for cores takes longer, a slow link does not."""
    across = 1.0 if is_slow(network, size) else crowd
    local, remote, one_way = (
        link.slowed(factor) if link else None
        for link, factor in ((network.local, crowd), (network.remote, across), (network.one_way, across))
    )
    return Network(local=local, remote=remote, one_way=one_way)
