"""Run the jobs that scaling_test.py measures, one at a time."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from examples.strategies import full_name
from measuring import Finished, run
from scaling.models import Link, Network, Shape, is_network_bound, link_from_ring, model_of
from trainer.errors import ConfigError
from trainer.tuning.open_mpi import ring_from_bytes

ROOT = Path(__file__).resolve().parents[2]
TRANSPORT_OF = {"horovod": "horovod", "ddp": "gloo", "ring": "ring", "parameter_server": "parameter_server"}
"""Transport in comm_bench.py of each strategy; ddp uses NCCL on GPUs."""
_DIVISORS = (16, 8, 4, 2, 1)
"""The gradients' size is divided by these, because messages are smaller on more ranks and with compression."""


class JobError(Exception):
    """A job failed; the text is its problem in one line."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and its slots, the number of ranks that it takes."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings that all runs share."""

    hosts: Sequence[Host]
    script: Sequence[str]
    """The training script and its arguments."""
    batch_flag: str
    """The script's option for its batch size; empty where it has none."""
    steps: int | None
    """Measured steps of each run; None for a whole epoch."""
    timeout_s: float
    """Of each run."""
    global_batch: bool = False
    """Whether the script's option is for the samples of all ranks per step, and not for those of each."""

    def batch_option(self, batch: int, ranks: int) -> list[str]:
        """Return the script's option for so many samples per rank and step."""
        return [self.batch_flag, str(batch * ranks if self.global_batch else batch)] if self.batch_flag else []

    def placement(self, shape: Shape) -> str:
        """Return the value of horovodrun's -H for a shape."""
        return ",".join(f"{host.name}:{shape.per_host}" for host in self.hosts[: shape.hosts])

    def launch(self, shape: Shape, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on every rank of a shape."""
        if shape.ranks == 1:
            return list(command)
        return ["horovodrun", "-np", str(shape.ranks), "-H", self.placement(shape), *command]


def time_steps(
    plan: Plan,
    shape: Shape,
    strategy: str,
    batch: int,
    *,
    threads: int | None = None,
    options: Sequence[str] = (),
    exchanges: bool = True,
) -> dict[str, Any]:
    """Run the script once and return the timing of its last epoch: the fields of `EpochTiming` (scripts/scaling).

    Args:
        batch: samples per rank and step.
        threads: PyTorch threads per rank; None for the default.
        options: further options of the script.
        exchanges: whether the ranks all-reduce their gradients.

    Raises:
        JobError: the script failed, timed out, or wrote no timing.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-scaling-") as folder:
        file = Path(folder, "timing.jsonl")
        timed = [sys.executable, str(ROOT / "scripts/timed.py"), *(["--steps", str(plan.steps)] if plan.steps else [])]
        timed += [str(file)] if exchanges else ["--no-exchange", str(file)]
        command = [*timed, *plan.script, *options, *plan.batch_option(batch, shape.ranks)]
        env = {"TRAINER_STRATEGY": full_name(strategy)}
        if threads is not None:
            env["OMP_NUM_THREADS"] = str(threads)
        done = _run(plan.launch(shape, command), env, plan.timeout_s)
        lines = file.read_text().splitlines() if file.exists() else []
        if not lines:
            raise JobError(
                "it left no timing: rank 0 has to run on this host, train through Trainer or trainer.init, and "
                f"take more than 5 steps; its last line of output: {done.last_line}"
            )
        timing: dict[str, Any] = json.loads(lines[-1])
    if timing["world_size"] != shape.ranks:
        raise JobError(f"it trained on {timing['world_size']} ranks")
    if timing["strategy"].lower() != strategy.replace("_", ""):
        raise JobError(f"it trained under {timing['strategy']}; leave the script's own choice of strategy at auto")
    _check_batch(plan, batch, timing)
    return timing


def _check_batch(plan: Plan, batch: int, timing: Mapping[str, Any]) -> None:
    """Raise `JobError` where the script understood its batch size as of all ranks, and not of each, or conversely."""
    ranks = timing["world_size"]
    seen = timing["samples"] / timing["steps"] / ranks
    mistaken = batch * ranks if plan.global_batch else batch / ranks
    # Steps that are not full take any other number.
    if plan.batch_flag and ranks > 1 and math.isclose(seen, mistaken, rel_tol=0.05):
        given = " ".join(plan.batch_option(batch, ranks))
        remedy = "leave --global-batch out" if plan.global_batch else "add --global-batch"
        raise JobError(
            f"given {given} on {ranks} ranks, the script took {seen:g} samples per rank and step, not {batch}; {remedy}"
        )


def time_network(plan: Plan, strategies: Sequence[str], size: int, device: str) -> dict[str, Network]:
    """Measure the links within a host and between two hosts, with the transport of each strategy.

    Args:
        size: bytes of the gradients.
        device: cpu or cuda.

    Raises:
        JobError: a link cannot be measured.
    """
    first, second = plan.hosts[0], plan.hosts[1] if len(plan.hosts) > 1 else None
    local = _time_links(plan, f"{first.name}:2", strategies, size, device) if first.slots > 1 else {}
    if second is None:
        return {name: Network(local=local.get(name)) for name in strategies}
    remote = _time_links(plan, f"{first.name}:1,{second.name}:1", strategies, size, device)
    networks = {name: Network(local=local.get(name), remote=remote.get(name)) for name in strategies}
    # Two ranks send in both directions over one connection, which some transports do at reduced speed. Rings of more
    # ranks send in one direction per connection, so the link is measured again with three ranks.
    four = Shape(hosts=2, per_host=2)
    rings = [
        name for name in strategies if model_of(name, size, four) == "ring" and is_network_bound(networks[name], size)
    ]
    if rings and first.slots > 1:
        three = _time_links(plan, f"{first.name}:2,{second.name}:1", rings, size, device)
        for name, times in three.items():
            # Horovod uses a ring only from a certain size on. The time of 4 bytes is latency under any algorithm.
            least = ring_from_bytes(3) if name == "horovod" else 0
            points = tuple(point for point in times.points if point[0] == 4 or point[0] >= least)
            networks[name] = replace(networks[name], one_way=link_from_ring(Link(points), 3))
    return networks


def time_beside_compute(plan: Plan, shape: Shape, strategy: str, size: int, compute_s: float) -> float:
    """Measure computing for so long and an all-reduce, on the ranks of a shape and with a strategy's transport.

    Where ranks share cores, this has what they wait for each other's time slices, which no two ranks with a core each
    show.

    Args:
        size: bytes of the gradients.
        compute_s: seconds of a core that a rank takes between two all-reduces.

    Raises:
        JobError: it cannot be measured.
    """
    options = ["--sizes", str(size), "--compute-ms", f"{compute_s * 1e3:.3f}", "--repeats", "10", "--device", "cpu"]
    rows = _all_reduce(plan, plan.placement(shape), [TRANSPORT_OF[strategy]], options)
    if not rows:
        raise JobError(f"{strategy} has no transport on {shape}; scripts/comm_bench.py prints the reason")
    return float(rows[0]["seconds"])


def _time_links(plan: Plan, placement: str, strategies: Sequence[str], size: int, device: str) -> dict[str, Link]:
    """Measure an all-reduce on the ranks of `placement`, at the size of the gradients and below."""
    ranks = sum(host.slots for host in parse_hosts(placement))
    # A ring's messages are K/N, so more ranks get a larger K for messages of the same size.
    sizes = [4, *(max(16, size * ranks // 2 // divisor) for divisor in _DIVISORS)]
    keys = {name: "nccl" if name == "ddp" and device == "cuda" else TRANSPORT_OF[name] for name in strategies}
    rows = _all_reduce(
        plan, placement, keys.values(), ["--sizes", *map(str, sizes), "--repeats", "2", "--device", device]
    )
    links = {}
    for name, key in keys.items():
        points = tuple((row["size"], row["seconds"]) for row in rows if row["key"] == key)
        if not points:
            raise JobError(f"{name} has no transport on {placement}; scripts/comm_bench.py prints the reason")
        links[name] = Link(points)
    return links


def _all_reduce(plan: Plan, placement: str, transports: Iterable[str], options: Sequence[str]) -> list[dict[str, Any]]:
    """Run comm_bench.py on the ranks of `placement`; return its rows."""
    ranks = sum(host.slots for host in parse_hosts(placement))
    with tempfile.TemporaryDirectory(prefix="trainer-scaling-") as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, str(ROOT / "scripts/comm_bench.py"), "--only", *transports, *options]
        command += ["--max-seconds", "1e9", "--json", str(file)]
        _run(["horovodrun", "-np", str(ranks), "-H", placement, *command], {}, plan.timeout_s)
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Finished:
    """Run a command to its end; end it with all its processes at the timeout.

    Raises:
        JobError: it failed or timed out.
    """
    done = run(command, env={**os.environ, **env}, timeout_s=timeout_s)
    if done.problem:
        raise JobError(done.problem)
    return done


def parse_hosts(text: str) -> list[Host]:
    """Parse hosts and slots, as in `a:2,b:2`.

    Raises:
        ConfigError: the text is not valid.
    """
    hosts = []
    for part in text.split(","):
        name, _, slots = part.partition(":")
        if not name or not slots.isdecimal() or int(slots) < 1:
            raise ConfigError(f"--hosts is {text!r}; valid is host:ranks,host:ranks, as in a:2,b:2")
        hosts.append(Host(name=name, slots=int(slots)))
    return hosts


def parse_shapes(text: str | None, hosts: Sequence[Host]) -> list[Shape]:
    """Parse shapes, as in `1x1,2x2`; None gives one host and all hosts, with one rank and all slots on each.

    Raises:
        ConfigError: the text is not valid, or the hosts have too few slots for a shape.
    """
    slots_per_host = min(host.slots for host in hosts)
    if text is None:
        sizes = [(count, ranks) for count in (1, len(hosts)) for ranks in (1, slots_per_host)]
        return [Shape(hosts=count, per_host=ranks) for count, ranks in dict.fromkeys(sizes)]
    shapes = []
    for part in text.replace("×", "x").split(","):
        count, _, ranks = part.partition("x")
        if not (count.isdecimal() and ranks.isdecimal() and int(count) and int(ranks)):
            raise ConfigError(f"--shapes is {text!r}; valid is hosts x ranks on each, as in 1x1,1x2,2x1,2x2")
        shape = Shape(hosts=int(count), per_host=int(ranks))
        slots = [host.slots for host in hosts[: shape.hosts]]
        if len(slots) < shape.hosts or min(slots) < shape.per_host:
            named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
            raise ConfigError(f"--shapes has {part}, for which --hosts {named} has no room")
        shapes.append(shape)
    # Efficiency and predictions need a single rank.
    return list(dict.fromkeys([Shape(hosts=1, per_host=1), *shapes]))
