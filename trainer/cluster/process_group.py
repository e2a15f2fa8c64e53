"""torch.distributed's default process group, under every launcher.

Libraries ask it, or RANK and WORLD_SIZE, whether they are alone: metrics, samplers, datasets. So every job has it,
whatever sums its gradients.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.cluster import network
from trainer.cluster.environment import set_default
from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.mpi import connects_by_mpi, import_mpi
from trainer.cluster.output import warn
from trainer.cluster.world import World
from trainer.errors import ConfigError

_TIMEOUT = timedelta(minutes=30)
"""Of a collective: torch's own for Gloo. The watch for hangs ends a job earlier."""
_GLOO_SHUTDOWN_S = 0.05
AllGather = Callable[[str], list[str]]
"""Returns every rank's text, in the order of the ranks. Collective."""


def join_group(world: World) -> tuple[dist.ProcessGroup | None, Callable[[], None]]:
    """Make the default process group, unless the script has made it; set RANK and the like where nobody has.

    On GPUs it has Gloo as well as NCCL, which makes its communicator when something first uses it. Collective.

    Returns:
        The group for host memory where the default group takes only GPUs' tensors, else None; a function that leaves
        the group, unless it is the script's.

    Raises:
        ConfigError: the launcher provides no rendezvous, or the script's group has other ranks than the job.
    """
    _set_ranks(world)
    if dist.is_initialized():  # by an earlier run in this process, or by the script, which then also ends it
        _check_ranks(world)
        if world.device.type == "cuda":
            network.choose_nccl_interface()
        if "cpu" in dist.get_backend_config():
            return None, lambda: None
        network.choose_gloo_interface(network.address_toward_master(is_one_host=world.local_size == world.size))
        host_group: Any = dist.new_group(backend="gloo")
        return host_group, lambda: None
    backend = "gloo"
    if world.device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(world.device)
    if world.size == 1:
        with network.gloo_on_loopback():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    elif LAUNCHERS[world.launcher].rendezvous == "store":
        network.choose_gloo_interface(network.address_toward_master(is_one_host=world.local_size == world.size))
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
    else:
        _init_process_group(backend, world)
    return None, _leave


def _leave() -> None:
    if dist.is_initialized():  # else the script has ended it
        dist.destroy_process_group()
    # Gloo's threads release their last tensor a moment later, and need Python for that. Where Python is already
    # shutting down by then, they abort the process (1 run in 6, measured).
    time.sleep(_GLOO_SHUTDOWN_S)


def _set_ranks(world: World) -> None:
    """Set torchrun's variables for this rank. Its addresses stay unset: no store listens at any."""
    if world.size == 1:
        return
    facts = {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    if other := [name for name, value in facts.items() if os.environ.get(name, "") not in ("", value)]:
        if world.is_root:
            warn(
                f"{other[0]} is {os.environ[other[0]]}, and {world.launcher} has started this as rank {world.rank} of "
                f"{world.size}: libraries that read it take a wrong part of the data; unset it"
            )
        return
    if world.device.index in (None, world.local_rank):  # else LOCAL_RANK would not be the number of this rank's GPU
        facts |= {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
    for name, value in facts.items():
        set_default(name, value)


def _check_ranks(world: World) -> None:
    theirs = (dist.get_rank(), dist.get_world_size())
    if theirs != (world.rank, world.size):
        raise ConfigError(
            f"torch.distributed's process group was made before trainer.init, and this is rank {theirs[0]} of "
            f"{theirs[1]} there; for {world.launcher} it is rank {world.rank} of {world.size}, which must be the same"
        )


# Where no store of torch.distributed's connects the ranks, they find one another over what their launcher provides.


def _init_process_group(backend: str, world: World) -> None:
    """Call torch.distributed's `init_process_group`, on the network between the ranks. Collective.

    On one host, the ranks share a store that no other user can open. On several, rank 0 serves one over TCP.
    """
    with _over_launcher(world) as all_gather:
        hosts = all_gather(network.host_id())
        address = network.address_toward(hosts)
        network.choose_gloo_interface(address)
        if "nccl" in backend:
            network.choose_nccl_interface(address)
        store = _share_memory(world, all_gather) if len(set(hosts)) == 1 else None
        store = store or _connect_by_tcp(address, world, all_gather)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)


@contextmanager
def _over_launcher(world: World) -> Iterator[AllGather]:
    """Yield a function that gathers texts by MPI, or by Horovod's controller where that is all that connects ranks."""
    horovod = sys.modules.get("horovod.torch")
    if connects_by_mpi(world) and not (horovod and horovod.is_initialized()):  # it is by strategy 'horovod'
        comm: Any = import_mpi(world, for_what="the rendezvous of these ranks").COMM_WORLD
        yield comm.allgather
        return
    import horovod.torch as hvd

    is_ours = not hvd.is_initialized()  # else whoever initialized it shuts it down as well
    hvd.init()
    yield hvd.allgather_object
    if is_ours:
        hvd.shutdown()


def _share_memory(world: World, all_gather: AllGather) -> Any:
    """Return a store in a file that is only in memory; None where a rank cannot open it, as in another PID namespace.

    The file is in no folder, so that no start finds that of another one, and none is left after a kill. Every rank
    keeps it open until its process ends: the store opens it again and again by the number of this descriptor, which
    must not become that of another file.
    """
    name = f"trainer.store.{secrets.token_hex(16)}"
    descriptor = _make_file(name) if world.is_root else None
    place = all_gather("" if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor} {name}")[0]
    if place and not world.is_root:
        descriptor = _open_file(*place.split())
    if all(all_gather("" if descriptor is None else "open")):
        return dist.FileStore(f"/proc/self/fd/{descriptor}")  # type: ignore[attr-defined]
    if descriptor is not None:
        os.close(descriptor)
    return None


def _make_file(name: str) -> int | None:
    try:
        return os.memfd_create(name)
    except (AttributeError, OSError):  # another system than Linux, or a sandbox that forbids it
        return None


def _open_file(path: str, name: str) -> int | None:
    """Open the file of another rank; None where this process sees none, or one of another name, in this place."""
    try:
        return os.open(path, os.O_RDWR) if str(Path(path).readlink()).startswith(f"/memfd:{name} ") else None
    except OSError:
        return None


def _connect_by_tcp(address: str, world: World, all_gather: AllGather) -> Any:
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = _serve_store(make_store, address, world.size) if world.is_root else None
    host, port = all_gather(f"{address} {store.port}" if store else "")[0].split()
    return store or make_store(host, int(port), world.size, False)


def _serve_store(make_store: Any, address: str, ranks: int) -> Any:
    # Left to itself, the store listens on every interface, and it asks nobody who they are.
    listener = socket.create_server((address, 0), backlog=max(128, ranks))
    port = listener.getsockname()[1]
    return make_store(address, port, ranks, True, wait_for_workers=False, master_listen_fd=listener.detach())
