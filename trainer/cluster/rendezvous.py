"""Rendezvous: exchanges short strings between ranks over the launcher's channel, before any process group exists."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.mpi import connects_by_mpi, import_mpi
from trainer.cluster.network import address_toward, choose_gloo_interface, choose_nccl_interface, host_id
from trainer.cluster.world import World

_NUMBERS = count()


class Rendezvous:
    """A channel between all ranks of a job. Every call is collective, the constructor included.

    torchrun's store, Horovod's controller or MPI carries the strings, whichever the launcher has provided.

    Raises:
        ConfigError: the launcher has provided none of them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._rounds = 0
        self.close: Callable[[], object] = lambda: None
        """Leaves the rendezvous; every rank calls it."""
        self._all_gather = self._choose_channel()

    def all_gather(self, text: str) -> list[str]:
        """Return every rank's text, in the order of the ranks."""
        self._rounds += 1
        return self._all_gather(text)

    def _choose_channel(self) -> Callable[[str], list[str]]:
        if self._world.size == 1:
            return lambda text: [text]
        if LAUNCHERS[self._world.launcher].rendezvous == "store":
            return self._over_store()
        if (horovod := sys.modules.get("horovod.torch")) and horovod.is_initialized():  # by strategy 'horovod'
            return self._over_horovod()
        return self._over_mpi() if connects_by_mpi(self._world) else self._over_horovod()

    def _over_store(self) -> Callable[[str], list[str]]:
        import torch.distributed as dist

        size, rank = self._world.size, self._world.rank
        store, _, _ = next(iter(dist.rendezvous("env://", rank=rank, world_size=size)))  # type: ignore[attr-defined]
        # The store keeps earlier rendezvous' strings, those from before a restart by torchrun among them.
        prefix = f"trainer.rendezvous.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_NUMBERS)}"
        store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

        def all_gather(text: str) -> list[str]:
            store.set(f"{self._rounds}.{rank}", text)
            if rank == 0:  # one request from each rank is enough then
                texts = [store.get(f"{self._rounds}.{other}").decode() for other in range(size)]
                store.set(str(self._rounds), json.dumps(texts))
            return list(json.loads(store.get(str(self._rounds))))

        return all_gather

    def _over_horovod(self) -> Callable[[str], list[str]]:
        import horovod.torch as hvd

        if not hvd.is_initialized():  # else whoever initialized it shuts it down as well
            hvd.init()
            self.close = hvd.shutdown
        return lambda text: list(hvd.allgather_object(text, name=f"trainer.rendezvous.{self._rounds}"))

    def _over_mpi(self) -> Callable[[str], list[str]]:
        comm: Any = import_mpi(self._world, for_what="the rendezvous of these ranks").COMM_WORLD
        return comm.allgather  # type: ignore[no-any-return]


def init_process_group(backend: str, world: World, rendezvous: Rendezvous, timeout: timedelta | None = None) -> None:
    """Call torch.distributed's `init_process_group` under any launcher, on the network between the ranks. Collective.

    On one host, the ranks share a store that no other user can open. On several, rank 0 serves one over TCP.

    Args:
        backend: "gloo", "nccl" or both, as in "cpu:gloo,cuda:nccl".
        timeout: of each collective; torch's default when None.
        rendezvous: tells the other ranks where rank 0's store is.
    """
    import torch.distributed as dist

    hosts = rendezvous.all_gather(host_id())
    address = address_toward(hosts)
    if "gloo" in backend:
        choose_gloo_interface(address)
    if "nccl" in backend:
        choose_nccl_interface(address)
    store = _share_memory(world, rendezvous) if len(set(hosts)) == 1 else None
    store = store or _connect_by_tcp(address, world, rendezvous)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _share_memory(world: World, rendezvous: Rendezvous) -> Any:
    """Return a store in a file that is only in memory; None where a rank cannot open it, as in another PID namespace.

    The file is in no folder, so that no start finds that of another one, and none is left after a kill. Every rank
    keeps it open until its process ends: the store opens it again and again by the number of this descriptor, which
    must not become that of another file.
    """
    import torch.distributed as dist

    name = f"trainer.store.{secrets.token_hex(16)}"
    descriptor = _make_file(name) if world.is_root else None
    place = rendezvous.all_gather("" if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor} {name}")[0]
    if place and not world.is_root:
        descriptor = _open_file(*place.split())
    if all(rendezvous.all_gather("" if descriptor is None else "open")):
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


def _connect_by_tcp(address: str, world: World, rendezvous: Rendezvous) -> Any:
    import torch.distributed as dist

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = _serve_store(make_store, address, world.size) if world.is_root else None
    host, port = rendezvous.all_gather(f"{address} {store.port}" if store else "")[0].split()
    return store or make_store(host, int(port), world.size, False)


def _serve_store(make_store: Any, address: str, ranks: int) -> Any:
    # Left to itself, the store listens on every interface, and it asks nobody who they are.
    listener = socket.create_server((address, 0), backlog=max(128, ranks))
    port = listener.getsockname()[1]
    return make_store(address, port, ranks, True, wait_for_workers=False, master_listen_fd=listener.detach())
