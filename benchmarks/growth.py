"""How the costs of a job grow with its ranks, with the checkpoints that are there, and with the samples of its data.

    python -m benchmarks.growth
    python -m benchmarks.growth --only join --ranks 2 4 8 16 32
    python -m benchmarks.growth --only hub sweep --simulated 64 1024

"join" starts jobs of a tiny model on this host, under torchrun and horovodrun. In everything else the ranks are
simulated, each on a host of its own, which costs the most; what they talk to is real. CPU time is that of what is
measured alone, and tells more than the clock where ranks share cores.

The last column is the exponent of the cost: 0 constant, 1 linear, 2 quadratic. It is taken between the two largest
numbers, because at small ones a constant part outweighs the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine, load
from trainer.checkpoint.disk.commit import begin, commit, contribute
from trainer.checkpoint.disk.committed import name_of, newest
from trainer.checkpoint.disk.state_files import part_name
from trainer.cluster.rendezvous import Rendezvous
from trainer.cluster.world import World
from trainer.errors import TrainerError
from trainer.loop.consistency import PeriodicCheck, check_consistency, describe_model
from trainer.ops.supervise.hosts import Host as RemoteHost
from trainer.ops.supervise.remote import on_all_hosts
from trainer.ops.watcher.job import Host, Job, View
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import Spoke
from trainer.watch import start as watch
from trainer.watch.failure import report_failures
from trainer.watch.heartbeat import State

Figures = dict[str, float]
_TIMEOUT_S = 900.0
_WATCHED_S = 10.0


@contextmanager
def costs(figures: Figures) -> Iterator[None]:
    """Context whose time, and whose CPU time in this process, are added to the figures."""
    began, cpu_began = time.perf_counter(), time.process_time()
    yield
    figures["ms"] = (time.perf_counter() - began) * 1e3
    figures["CPU ms"] = (time.process_time() - cpu_began) * 1e3


def join(launcher: str, ranks: int) -> Figures:
    """Seconds until the slowest rank of a real job has joined, CPU seconds of a rank, and what the ranks compare.

    Raises:
        TrainerError: the job has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch(str(Path(__file__).with_name("growth_job.py")), ranks, launcher), folder]
        if (finished := run(command, timeout_s=_TIMEOUT_S)).problem is not None:
            raise TrainerError(f"{launcher}, {ranks} ranks: {finished.problem}")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    return {
        "s": max(figures["join s"] for figures in found),
        "CPU ms a rank": statistics.median(figures["join CPU s"] for figures in found) * 1e3,
        "messages": found[0]["checks"],
        "kB a rank": found[0]["checks kB"],
    }


def rendezvous(ranks: int) -> Figures:
    """An exchange of strings over torchrun's store; ranks are threads."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    barrier, figures = threading.Barrier(ranks), Figures()

    def exchange(rank: int) -> None:
        channel = Rendezvous(World(rank=rank, size=ranks, launcher="torchrun"))
        barrier.wait()
        with costs(figures):
            assert channel.all_gather(f"host-{rank} " + "0" * 36)[-1].startswith(f"host-{ranks - 1}")

    numbers = "trainer.cluster.rendezvous._NUMBERS"
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch(numbers, iter([ranks] * ranks)),
        ThreadPoolExecutor(ranks) as pool,
    ):
        list(pool.map(exchange, range(ranks)))
    return {"ms": figures["ms"], "CPU ms of all ranks": figures["CPU ms"]}  # until the last one has all strings


class Gathering:
    """A rank's strategy, to which all other ranks send what this one does."""

    def __init__(self, ranks: int) -> None:
        self.world, self.messages, self.bytes = World(rank=0, size=ranks), 0, 0

    def all_gather_object(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        self.messages += 1
        self.bytes += len(data) * self.world.size
        return [pickle.loads(data) for _ in range(self.world.size)]  # noqa: S301 (our own)


def checks(ranks: int) -> Figures:
    """What `prepare` compares of a transformer of 24 layers, and what is compared at a step."""
    strategy: Any = Gathering(ranks)
    model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(64, 4, 128) for _ in range(24)])
    optimizer, periodic = torch.optim.SGD(model.parameters(), lr=0.1), PeriodicCheck(strategy)
    figures: Figures = {}
    with costs(figures):
        check_consistency(strategy, describe_model(model))
        periodic.compare((0, 0, 1), {0: optimizer}, {0: model})
    return {**figures, "messages": strategy.messages, "kB a rank": strategy.bytes / 1000}


class Rank(LocalRanks):
    """The rank of a simulated host, which goes on."""

    def __init__(self, rank: int) -> None:
        super().__init__({})
        self._rank, self._events = rank, 0

    def views(self) -> dict[int, View]:
        self._events += 1
        seen = View(rank=self._rank, state=State.WAITING, what="gradients", steps=9, events=self._events)
        return {self._rank: seen}


@cache
def _record() -> str:
    """Return where this process, which stands for rank 0, has its heartbeat."""
    entry = watch.describe(World(rank=0, size=2))
    assert entry is not None
    return entry.record


def hub(ranks: int) -> Figures:
    """The watcher of rank 0's host, in CPU time per second, where each other host's reports once a second."""
    token = "ab" * 32
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, ranks)) as listener:
        settings = {"given_s": None, "start_s": 1800.0, "endpoint": "", "number": 0, "token": token, "script": "growth"}
        hosts = [(f"host-{rank}", [rank]) for rank in range(ranks)]
        watch._launch({**settings, "hosts": hosts, "records": {0: _record()}}, listener)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    program = psutil.Process(watch._held[-1].pid)
    spokes = []
    for rank in range(1, ranks):
        # What a spoke knows of further hosts it does not use, and a million of them would take this process's memory.
        pair = [Host("host-0", (0,)), Host(f"host-{rank}", (rank,))]
        spokes.append(Spoke(Job(pair, 1, token, None, 1800.0, endpoint, "growth"), Rank(rank)))
        spokes[-1]._job.number = rank
    began = time.monotonic()
    connected_s = _tick(spokes, began + 60.0, until_connected=True) - began
    cpu_before, bytes_before = sum(program.cpu_times()[:2]), _received(spokes)
    _tick(spokes, time.monotonic() + _WATCHED_S)
    cpu_s = sum(program.cpu_times()[:2]) - cpu_before
    lost = sum(not (spoke._links and spoke._links[0].is_proven) for spoke in spokes)
    figures = {
        "connected s": connected_s,
        "lost": lost,
        "CPU ms/s": cpu_s / _WATCHED_S * 1e3,
        "messages/s": (_received(spokes) - bytes_before) / _WATCHED_S,
        "kB/s": ranks * len(json.dumps({"host": 1, "views": [Rank(1).views()[1].as_dict()]})) / 1000,
    }
    program.kill()
    for spoke in spokes:
        spoke.leave()
    return figures


def _tick(spokes: Sequence[Spoke], deadline: float, *, until_connected: bool = False) -> float:
    """Let the spokes do what they do 4 times a second; return when that ended."""
    while (now := time.monotonic()) < deadline:
        for spoke in spokes:
            spoke.tick()
        if until_connected and all(spoke._reported_at for spoke in spokes):
            break
        time.sleep(max(0.0, 0.25 - (time.monotonic() - now)))
    return time.monotonic()


def _received(spokes: Sequence[Spoke]) -> int:
    return sum(spoke._links[0]._sent for spoke in spokes if spoke._links)


def sweep(ranks: int) -> Figures:
    """One look of `trainer run` at all hosts, by an ssh that answers at once."""
    record = bytes(View(rank=1, steps=9))
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "answer").write_bytes(b"trainer-host 17\n" + record)
        ssh = Path(folder) / "ssh"
        ssh.write_text(f"#!/bin/sh\nexec cat {folder}/answer\n")
        ssh.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": f"{folder}:{os.environ['PATH']}"}), costs(figures):
            answers = on_all_hosts([RemoteHost(f"host-{rank}", 1) for rank in range(ranks)], "0" * 32, "look")
    return {**figures, "lost": sum(not answer.is_well for answer in answers), "kB": ranks * len(record) / 1000}


def committing(ranks: int) -> Figures:
    """The commit of a checkpoint, once each rank has written its part."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        place, name, parts = Path(folder), name_of(1, 0, 1), [part_name(rank) for rank in range(1, ranks)]
        begin(place, name)
        for part in parts:
            contribute(place, name, part, lambda file: file.write(b"weights"))
        own = {part_name(0): lambda file: file.write(b"weights")}
        with costs(figures):
            done = commit(place, name, own, {}, others=parts)
        return {**figures, "kB": (done.path / "manifest.json").stat().st_size / 1000}


def finding(checkpoints: int) -> Figures:
    """Finding the newest of so many checkpoints, and checking it."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for update in range(checkpoints - 1):
            (Path(folder) / name_of(1, 0, update)).mkdir()
        commit(Path(folder), name_of(1, 1, 0), {"state.pt": lambda file: file.write(b"weights")}, {})
        with costs(figures):
            found = newest(Path(folder), print)
        assert found is not None
        assert found.order == (1, 1, 0)
    return figures


class Numbers(torch.utils.data.Dataset[int]):
    """Samples that take no memory."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


def order(samples: int) -> Figures:
    """A rank's first batch of an epoch of so many samples, and the memory until it has 1,000; in a new process."""
    code = (
        "import json, resource\nfrom benchmarks.growth import *\nfrom trainer.data.loader import ShardedLoader\n"
        "list(ShardedLoader(Numbers(100), 10, world=World(rank=0, size=1)))\n"  # what a first loader imports
        "figures, peak = {}, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        f"loader = iter(ShardedLoader(Numbers({samples}), 100, world=World(rank=0, size=2)))\n"
        "with costs(figures):\n    next(loader)\n"
        "for _ in range(1000):\n    next(loader)\n"
        "print(json.dumps({**figures, 'MB': (peak() - before) / 1000}))\n"
    )
    finished = run([sys.executable, "-c", code], timeout_s=_TIMEOUT_S)
    if finished.problem is not None:
        raise TrainerError(finished.problem)
    return dict(json.loads(finished.stdout.splitlines()[-1]))


_OF_RANKS: dict[str, Callable[[int], Figures]] = {
    "rendezvous": rendezvous,
    "checks": checks,
    "hub": hub,
    "sweep": sweep,
    "commit": committing,
}


def exponent(at: Sequence[int], values: Sequence[float]) -> float:
    """Return with which power of their number the values grow, between the two largest numbers."""
    if len(at) < 2 or min(values[-2:]) <= 0:
        return 0.0
    return math.log(values[-1] / values[-2]) / math.log(at[-1] / at[-2])


def table(name: str, at: Sequence[int], rows: Sequence[Figures]) -> str:
    """Format a cost's figures in Markdown, a figure per row."""
    lines = [f"| {name} | {' | '.join(f'{number:,}' for number in at)} | exponent |", "|---" * (len(at) + 2) + "|"]
    for figure in rows[0]:
        values = [row[figure] for row in rows]
        cells = " | ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
        lines.append(f"| {figure} | {cells} | {exponent(at, values):.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    report_failures()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["join", *_OF_RANKS, "finding", "order"]
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="of the real jobs")
    parser.add_argument("--simulated", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="ranks")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[1, 10, 100, 1000, 10_000])
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 4 * 10**6, 10**8, 10**9])
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts (default: %(default)s)")
    args = parser.parse_args(arguments)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), f"load {load():.1f}", sep="; ")
    kinds: dict[str, tuple[Sequence[int], Callable[[int], Figures]]] = {
        **{name: (args.simulated, cost) for name, cost in _OF_RANKS.items()},
        "finding": (args.checkpoints, finding),
        "order": (args.samples, order),
        "join, torchrun": (args.ranks, lambda ranks: join("torchrun", ranks)),
        "join, horovodrun": (args.ranks, lambda ranks: join("horovodrun", ranks)),
    }
    for name, (at, cost) in kinds.items():
        if name.partition(",")[0] in args.only:
            rows = [_median([cost(number) for _ in range(args.repeats)]) for number in at]
            print("", table(name, at, rows), sep="\n", flush=True)
    return 0


def _median(found: Sequence[Figures]) -> Figures:
    return {figure: statistics.median(figures[figure] for figures in found) for figure in found[0]}


if __name__ == "__main__":
    sys.exit(main())
