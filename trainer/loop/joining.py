"""Join the job: choose the device and the strategy, connect the ranks, start the watch."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import TIMEOUT_MAX, Timer

import torch

from trainer.cluster.environment import user_set
from trainer.cluster.forks import wait_for_threads_before_forks
from trainer.cluster.gpus import SHARING_HINT, describe_sharing, gpu_id, sharing_is_on
from trainer.cluster.network import machine_id
from trainer.cluster.output import print_line, write_whole_lines
from trainer.cluster.processes import end_with_parent
from trainer.cluster.world import World, current_world
from trainer.config import RunConfig
from trainer.strategies import choose_strategy, has_nccl, make_strategy, wrapped
from trainer.strategies.base import Strategy
from trainer.tuning.host import share_machine
from trainer.watch import start as hang
from trainer.watch.failure import end_process, report_failures
from trainer.watch.heartbeat import LOST_PEER, report_failure, report_join, report_phase

_TRIED = ("2.10", "2.15")
"""The oldest and the newest PyTorch that all checks of docs/install.md have passed on."""
_UNCONNECTED_S = 20.0
"""Seconds without a connection between the ranks, after which rank 0 says that it waits."""
_UNCONNECTED = (
    "the ranks have not connected so far: one of them has not come to trainer.init, or a host cannot reach another; "
    "`trainer doctor`, with -H as the job has it, says why"
)


def join(strategy: str | Strategy, config: RunConfig) -> Strategy:
    """Join the job that this process was launched into; print on rank 0 which ranks have joined. Collective.

    A `Strategy` object is connected only: no watch is started for it.
    """
    report_failures()
    wait_for_threads_before_forks()
    if isinstance(strategy, Strategy):
        return _connected(wrapped(strategy))
    world = _world_to_join(strategy, config)
    hang_timeout_s = hang.hang_timeout_s(config.hang_timeout_s)
    with _said_until_connected(world, _UNCONNECTED, hang.start_limit_s(hang_timeout_s)):
        joined = _connected(wrapped(make_strategy(strategy, world)))
        facts = (world.host, machine_id(), gpu_id(world.device), hang.describe(world, hang_timeout_s))
        hosts, machines, gpus, watched = zip(*joined.all_gather_object(facts), strict=True)
    hang.start(joined.world, watched, joined.flight_recorder)
    if sharing_is_on() and (shared := describe_sharing(gpus)):
        joined.description += f"; {shared}"
    joined.tuning = {**joined.tuning, **share_machine(world, machines)}
    _print_first_line(joined, hosts)
    report_phase("joined")
    return joined


def _connected(strategy: Strategy) -> Strategy:
    """Connect the strategy, unless an earlier run has."""
    if not strategy.is_connected:
        strategy.connect()
        strategy.is_connected = True
    return strategy


def _world_to_join(strategy: str, config: RunConfig) -> World:
    """Return this process's rank, world size and the device that it will use, and report them to the watch."""
    world = current_world(config.device)
    if world.size > 1:
        write_whole_lines()
    report_join(world.rank)
    if user_set("TORCHELASTIC_RUN_ID"):  # by torchrun; the other launchers' ranks end with them by themselves
        end_with_parent(signal.SIGTERM)  # at which a run with checkpoints saves
    world = _with_usable_device(strategy, world, config)
    if world.device.type == "cuda":
        # Plain "cuda" in user code then means this rank's GPU, not the first GPU on every rank.
        torch.cuda.set_device(world.device)
    return world


def _print_first_line(strategy: Strategy, hosts: Sequence[str]) -> None:
    """Print on rank 0 which ranks have joined ("4 ranks on a: 2, b: 2"), and the transport."""
    if strategy.world.is_root:
        per_host = ", ".join(f"{host}: {ranks}" for host, ranks in Counter(hosts).items())
        ranks = f"{len(hosts)} ranks on {per_host}; " if len(hosts) > 1 else ""
        print_line(f"trainer: {ranks}{strategy.description}", sys.stderr)
        oldest, newest = _TRIED
        minor = ".".join(torch.__version__.split(".")[:2])
        if minor != newest and not oldest <= torch.__version__ < newest:
            passed = f"they have with {oldest} to {newest}"
            print_line(f"trainer: not all checks have passed with PyTorch {torch.__version__}; {passed}", sys.stderr)


@contextmanager
def _said_until_connected(world: World, text: str, end_s: float = 0.0) -> Iterator[None]:
    """Print on rank 0 what it waits for if that takes long; end the process, and so the job, after `end_s` seconds.

    No watch runs yet, and MPI waits for ever where a firewall is between two hosts.
    """
    timers = []
    if world.is_root and world.size > 1:
        timers.append(Timer(_UNCONNECTED_S, print_line, (f"trainer: {text}", sys.stderr)))
        if end_s:
            timers.append(Timer(min(end_s, TIMEOUT_MAX), _give_up, (world, f"given up after {end_s:.0f} s: {text}")))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _give_up(world: World, message: str) -> None:
    report_failure(LOST_PEER, message, world.rank)
    end_process(message, 1)


def _with_usable_device(strategy: str, world: World, config: RunConfig) -> World:
    """Return the world, moved to the CPU with a warning if device "auto" found GPUs that these ranks cannot use."""
    gpus = torch.cuda.device_count()
    if config.device != "auto" or gpus == 0:
        return world
    reason = None
    if world.device.type == "cpu":
        reason = f"this host has {gpus} GPU{'s' * (gpus > 1)} for {world.local_size} ranks; {SHARING_HINT}"
    elif choose_strategy(strategy, world) == "horovod" and not has_nccl():
        reason = "this Horovod was built without NCCL (docs/install.md says how to compile it with)"
    if reason is None:
        return world
    if world.is_root:
        print_line(f"trainer: WARNING: training on the CPU, because {reason}", sys.stderr)
    return replace(world, device=torch.device("cpu"))
