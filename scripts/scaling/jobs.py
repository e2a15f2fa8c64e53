"""The jobs that scaling_test.py measures: started one at a time, and ended with all their processes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaling.models import Link, Network, Shape, is_slow, model_of, of_ring
from trainer.errors import TrainerError
from trainer.launch.processes import Finished, run
from trainer.tuning.open_mpi import ring_from_bytes

ROOT = Path(__file__).resolve().parents[2]
TRANSPORT_OF = {"horovod": "horovod", "ddp": "gloo", "ring": "ring", "parameter_server": "parameter_server"}
"""The transport of comm_bench.py that each strategy uses; ddp uses NCCL where there are GPUs."""
_PARTS = (16, 8, 4, 2, 1)
"""Of the gradients' size: messages are so much smaller on more ranks, or with compression."""


class JobError(Exception):
    """A job that failed; its text is what the job said last, in one line."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs of a sitting have in common."""

    hosts: Sequence[Host]
    script: Sequence[str]
    """With its arguments."""
    batch_flag: str
    """By which the script takes the number of samples per rank and step; empty where it takes none."""
    steps: int | None
    timeout_s: float

    def place(self, shape: Shape) -> str:
        """The shape, as horovodrun's -H wants it."""
        return ",".join(f"{host.name}:{shape.per_host}" for host in self.hosts[: shape.hosts])

    def launch(self, shape: Shape, command: Sequence[str]) -> list[str]:
        if shape.ranks == 1:
            return list(command)
        return ["horovodrun", "-np", str(shape.ranks), "-H", self.place(shape), *command]


def time_steps(
    plan: Plan, shape: Shape, strategy: str, batch: int, *, threads: int | None = None, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs the script once and returns the timing of its last epoch: the fields of `trainer.timing.EpochTiming`.

    Raises:
        JobError: it failed, took too long, or left no timing.
    """
    command = [sys.executable, *plan.script, *options]
    if plan.batch_flag:
        command += [plan.batch_flag, str(batch)]
    with tempfile.TemporaryDirectory(prefix="trainer-scaling-") as folder:
        file = Path(folder, "timing.jsonl")
        env = {"TRAINER_TIMING": str(file), "TRAINER_TIMING_STEPS": str(plan.steps or "")}
        env["TRAINER_STRATEGY"] = strategy
        if threads is not None:
            env["OMP_NUM_THREADS"] = str(threads)
        done = _run(plan.launch(shape, command), env, plan.timeout_s)
        lines = file.read_text().splitlines() if file.exists() else []
        if not lines:
            raise JobError(
                "it left no timing: rank 0 has to run on this host, train through Trainer or trainer.prepare, and "
                f"take more than 5 steps; it said: {done.last_line}"
            )
        timing: dict[str, Any] = json.loads(lines[-1])
    if timing["world_size"] != shape.ranks:
        raise JobError(f"it trained on {timing['world_size']} ranks")
    if timing["strategy"].lower() != strategy.replace("_", ""):
        raise JobError(f"it trained under {timing['strategy']}; leave the script's own choice of strategy at auto")
    return timing


def time_network(plan: Plan, strategies: Sequence[str], size: int, device: str) -> dict[str, Network]:
    """What lies between ranks of one host, and of two, as each strategy's transport sees it.

    Args:
        size: of the gradients, bytes.

    Raises:
        JobError: it cannot be measured.
    """
    first, second = plan.hosts[0], plan.hosts[1] if len(plan.hosts) > 1 else None
    local = _time_links(plan, f"{first.name}:2", strategies, size, device) if first.slots > 1 else {}
    if second is None:
        return {name: Network(local=local.get(name)) for name in strategies}
    remote = _time_links(plan, f"{first.name}:1,{second.name}:1", strategies, size, device)
    found = {name: Network(local=local.get(name), remote=remote.get(name)) for name in strategies}
    # Two ranks send both ways over one connection, which not every transport does at full speed; larger rings never do.
    four = Shape(hosts=2, per_host=2)
    rings = [name for name in strategies if model_of(name, size, four) == "ring" and is_slow(found[name], size)]
    if rings and first.slots > 1:
        three = _time_links(plan, f"{first.name}:2,{second.name}:1", rings, size, device)
        for name, line in three.items():
            # Below a size of its own, Horovod's is no ring; what 4 bytes take is latency whatever carries them.
            least = ring_from_bytes(3) if name == "horovod" else 0
            points = tuple(point for point in line.points if point[0] == 4 or point[0] >= least)
            found[name] = replace(found[name], one_way=of_ring(Link(points), 3))
    return found


def _time_links(plan: Plan, place: str, strategies: Sequence[str], size: int, device: str) -> dict[str, Link]:
    """The times of an all-reduce on the ranks of `place`, at the size that is exchanged and below it."""
    ranks = sum(host.slots for host in parse_hosts(place))
    # On three ranks as much more as makes the messages, K/N each, those of two.
    sizes = [4, *(max(16, size * ranks // 2 // part) for part in _PARTS)]
    keys = {name: "nccl" if name == "ddp" and device == "cuda" else TRANSPORT_OF[name] for name in strategies}
    with tempfile.TemporaryDirectory(prefix="trainer-scaling-") as folder:
        file = Path(folder, "links.json")
        command = [sys.executable, str(ROOT / "scripts/comm_bench.py"), "--only", *keys.values(), "--repeats", "2"]
        command += ["--sizes", *map(str, sizes), "--max-seconds", "1e9", "--device", device, "--json", str(file)]
        _run(["horovodrun", "-np", str(ranks), "-H", place, *command], {}, plan.timeout_s)
        rows = json.loads(file.read_text())["rows"]
    links = {}
    for name, key in keys.items():
        points = tuple((row["size"], row["in_place_s"]) for row in rows if row["key"] == key)
        if not points:
            raise JobError(f"{name} has no transport on {place}; scripts/comm_bench.py says why")
        links[name] = Link(points)
    return links


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Finished:
    """Raises JobError where the exit code is not 0, or `timeout_s` are over."""
    done = run(command, env={**os.environ, **env}, timeout_s=timeout_s)
    if done.problem:
        raise JobError(done.problem)
    return done


def parse_hosts(text: str) -> list[Host]:
    """From `a:2,b:2`.

    Raises:
        TrainerError: it does not read like that.
    """
    hosts = []
    for part in text.split(","):
        name, _, slots = part.partition(":")
        if not name or not slots.isdecimal() or int(slots) < 1:
            raise TrainerError(f"--hosts is {text!r}; valid is host:ranks,host:ranks, as in a:2,b:2")
        hosts.append(Host(name=name, slots=int(slots)))
    return hosts


def parse_shapes(text: str | None, hosts: Sequence[Host]) -> list[Shape]:
    """From `1x1,2x2`; None stands for one and all hosts with one and all ranks.

    Raises:
        TrainerError: it does not read like that, or the hosts have no room for a shape.
    """
    room = min(host.slots for host in hosts)
    if text is None:
        sizes = [(count, ranks) for count in (1, len(hosts)) for ranks in (1, room)]
        return [Shape(hosts=count, per_host=ranks) for count, ranks in dict.fromkeys(sizes)]
    shapes = []
    for part in text.replace("×", "x").split(","):
        count, _, ranks = part.partition("x")
        if not (count.isdecimal() and ranks.isdecimal() and int(count) and int(ranks)):
            raise TrainerError(f"--shapes is {text!r}; valid is hosts x ranks on each, as in 1x1,1x2,2x1,2x2")
        shape = Shape(hosts=int(count), per_host=int(ranks))
        slots = [host.slots for host in hosts[: shape.hosts]]
        if len(slots) < shape.hosts or min(slots) < shape.per_host:
            named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
            raise TrainerError(f"--shapes has {part}, for which --hosts {named} has no room")
        shapes.append(shape)
    # Everything is measured against one rank.
    return list(dict.fromkeys([Shape(hosts=1, per_host=1), *shapes]))
