"""Where ranks meet before they have a way to talk: each launcher's own means, for a few short texts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from ipaddress import ip_address, ip_network
from itertools import count
from typing import Any

from trainer.config import set_default
from trainer.errors import ConfigError
from trainer.tuning import machine
from trainer.world import World

_MEETINGS = count()


class Meeting:
    """The ranks of a job, gathering texts. Collective from the first to the last call.

    Raises:
        ConfigError: the launcher has left no way for them to meet.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._rounds = 0
        self.close: Callable[[], object] = lambda: None
        """Ends it; every rank calls it when it needs nobody's text any more."""
        self._gather = self._choose()

    def gather(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks, on every rank."""
        self._rounds += 1
        return self._gather(text)

    def _choose(self) -> Callable[[str], list[str]]:
        if self._world.size == 1:
            return lambda text: [text]
        if self._world.launcher == "torchrun":
            return self._through_store()
        if self._world.launcher == "horovodrun":
            return self._through_horovod()
        return self._through_mpi()

    def _through_store(self) -> Callable[[str], list[str]]:
        import torch.distributed as dist

        size, rank = self._world.size, self._world.rank
        store, _, _ = next(iter(dist.rendezvous("env://", rank=rank, world_size=size)))  # type: ignore[attr-defined]
        # The store keeps what earlier meetings said, those before torchrun's restart of the ranks among them.
        meeting = f"trainer.meeting.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_MEETINGS)}"
        store = dist.PrefixStore(meeting, store)  # type: ignore[attr-defined]

        def gather(text: str) -> list[str]:
            store.set(f"{self._rounds}.{rank}", text)
            return [store.get(f"{self._rounds}.{other}").decode() for other in range(size)]

        return gather

    def _through_horovod(self) -> Callable[[str], list[str]]:
        import horovod.torch as hvd

        if not hvd.is_initialized():  # else somebody else is in there, and ends it
            hvd.init()
            self.close = hvd.shutdown
        return lambda text: list(hvd.allgather_object(text, name=f"trainer.meeting.{self._rounds}"))

    def _through_mpi(self) -> Callable[[str], list[str]]:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"ranks that {self._world.launcher} started meet over MPI, which needs mpi4py and Open MPI ({error}); "
                "install them with `pip install trainer[horovod]`, or start with torchrun"
            ) from None
        comm: Any = MPI.COMM_WORLD
        if comm.Get_size() != self._world.size:
            raise ConfigError(
                f"{self._world.launcher} started {self._world.size} ranks, and MPI sees {comm.Get_size()}; "
                "valid are Open MPI's mpirun and `srun --mpi=pmix`"
            )
        return comm.allgather  # type: ignore[no-any-return]


def here() -> str:
    """This host, told apart from one of the same name by its kernel's boot; for `address_towards`."""
    return f"{socket.gethostname()} {machine()}"


def address_towards(places: Sequence[str]) -> str:
    """This host's address on the network that leads to the other hosts; the loopback address where there are none.

    What the launcher chose for its own traffic counts first, then the kernel's route to the hosts by their names.

    Args:
        places: every rank's `here()`, this one's own among them.

    Raises:
        ConfigError: none of this can tell.
    """
    others = sorted({place.split()[0] for place in places if place != here()})
    if not others:
        return "127.0.0.1"
    for found in (_chosen_by_launcher(), *map(_route_to, (os.environ.get("MASTER_ADDR", ""), *others))):
        if found and not ip_address(found).is_loopback:
            return found
    raise ConfigError(
        f"cannot tell which of this host's addresses leads to {', '.join(others)}; set TRAINER_NETWORK to "
        "the network that they share, as in 10.0.0.0/24"
    )


def start_process_group(backend: str, world: World, meeting: Meeting, timeout: timedelta | None = None) -> None:
    """torch.distributed's `init_process_group`, under any launcher, on the network between the ranks. Collective.

    Args:
        backend: "gloo", "nccl" or both, as in "cpu:gloo,cuda:nccl".
        timeout: how long a rank waits for another; torch's own choice when None.
        meeting: where the ranks hear of the store that rank 0 opens.
    """
    import torch.distributed as dist

    address = address_towards(meeting.gather(here()))
    if "gloo" in backend and address != "127.0.0.1":
        set_default("GLOO_SOCKET_IFNAME", _interface_of(address))
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store(address, 0, world.size, True, wait_for_workers=False) if world.is_root else None
    host, port = meeting.gather(f"{address} {store.port}" if store else "")[0].split()
    store = store or make_store(host, int(port), world.size, False)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _interface_of(address: str) -> str:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise ConfigError(f"no interface of this host has the address {address}")


def _chosen_by_launcher() -> str | None:
    import psutil

    own = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    for variable in ("TRAINER_NETWORK", "OMPI_MCA_btl_tcp_if_include", "HOROVOD_GLOO_IFACE"):
        for part in os.environ.get(variable, "").split(","):
            found = own.get(part, [])
            if "/" in part:
                network = ip_network(part, strict=False)
                found = [
                    address for addresses in own.values() for address in addresses if ip_address(address) in network
                ]
            if found:
                return found[0]
    return None


def _route_to(host: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), 9))  # sends nothing: it makes the kernel choose
            return str(probe.getsockname()[0])
    except OSError:
        return None
