"""Rendezvous: exchanges short strings between ranks over the launcher's channel, before any process group exists."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

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
        if self._world.launcher == "torchrun":
            return self._over_store()
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
            return [store.get(f"{self._rounds}.{other}").decode() for other in range(size)]

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

    Args:
        backend: "gloo", "nccl" or both, as in "cpu:gloo,cuda:nccl".
        timeout: of each collective; torch's default when None.
        rendezvous: tells the other ranks the address of rank 0's store.
    """
    import torch.distributed as dist

    address = address_toward(rendezvous.all_gather(host_id()))
    if "gloo" in backend:
        choose_gloo_interface(address)
    if "nccl" in backend:
        choose_nccl_interface(address)
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = _serve_store(make_store, address, world.size) if world.is_root else None
    host, port = rendezvous.all_gather(f"{address} {store.port}" if store else "")[0].split()
    store = store or make_store(host, int(port), world.size, False)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _serve_store(make_store: Any, address: str, ranks: int) -> Any:
    # Left to itself, the store listens on every interface, and it asks nobody who they are.
    listener = socket.create_server((address, 0), backlog=max(128, ranks))
    port = listener.getsockname()[1]
    return make_store(address, port, ranks, True, wait_for_workers=False, master_listen_fd=listener.detach())
