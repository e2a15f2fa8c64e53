"""Rendezvous: how ranks that no store of torch.distributed's connects find one another, to make the process group."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.cluster.mpi import connects_by_mpi, import_mpi
from trainer.cluster.network import address_toward, choose_gloo_interface, choose_nccl_interface, host_id
from trainer.cluster.world import World

AllGather = Callable[[str], list[str]]
"""Returns every rank's text, in the order of the ranks. Collective."""


def init_process_group(backend: str, world: World, timeout: timedelta) -> None:
    """Call torch.distributed's `init_process_group`, on the network between the ranks. Collective.

    On one host, the ranks share a store that no other user can open. On several, rank 0 serves one over TCP.

    Args:
        backend: "gloo", or "cpu:gloo,cuda:nccl".
        timeout: of each collective.

    Raises:
        ConfigError: the launcher provides no channel between the ranks.
    """
    with _over_launcher(world) as all_gather:
        hosts = all_gather(host_id())
        address = address_toward(hosts)
        choose_gloo_interface(address)
        if "nccl" in backend:
            choose_nccl_interface(address)
        store = _share_memory(world, all_gather) if len(set(hosts)) == 1 else None
        store = store or _connect_by_tcp(address, world, all_gather)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


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
