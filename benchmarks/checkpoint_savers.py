"""Ways of saving a training, for the benchmark of checkpoints. Each keeps the model's and the optimizer's state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.optim import Optimizer

from trainer.data.base import Observer
from trainer.run import Run

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Setting:
    """What a way of saving is given."""

    run: Run
    model: nn.Module
    optimizer: Optimizer
    folder: Path
    """For its checkpoints."""
    every: int
    """Updates between two checkpoints."""

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[Tensor]:
        """Return the weights, and the optimizer's state beside each."""
        weights = [tensor.detach() for tensor in self.model.state_dict().values()]
        return weights + [tensor for one in self.optimizer.state.values() for tensor in one.values() if tensor.ndim]


class Saver:
    """A way of saving; this one saves nothing.

    Attributes:
        stalls_s: seconds for which each checkpoint has kept this rank from training.
        writes_s: seconds until each was on the disk.
        observer: saves in the loader, in place of `save`.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.stalls_s: list[float] = []
        self.writes_s: list[float] = []
        self.observer: Observer | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way. On rank 0."""
        return len(self.writes_s) < len(self.stalls_s)

    def save(self) -> None:
        """Save, and return when the training may go on. Collective."""

    def wait(self) -> None:
        """Return when everything is written. On rank 0."""
        while self.is_writing:
            time.sleep(0.001)


class Copy(Saver):
    """Copies the tensors into host memory that is there already, on rank 0, and writes nothing."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._buffers: list[Tensor] = []

    def save(self) -> None:
        if not self.setting.run.is_root:
            return
        tensors = self.setting.tensors()
        if len(self._buffers) < len(tensors):  # the first step makes the optimizer's state
            self._buffers = [torch.empty_like(tensor) for tensor in tensors]
        started = time.perf_counter()
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor)
        self.stalls_s.append(time.perf_counter() - started)
        self.writes_s.append(self.stalls_s[-1])


class Ours(Saver):
    """The library's checkpoints."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.observer = checkpoints = setting.run.checkpoints(
            setting.folder, every_updates=setting.every, resume="none", on_error="stop"
        )
        self.stalls_s, self.writes_s = checkpoints.stalls_s, checkpoints.writes_s
        self._epochs = setting.run.epochs(1)
        next(self._epochs)  # all blocks are one epoch to it


class TorchSave(Saver):
    """`torch.save` within the loop: rank 0 writes, syncs and renames a file, and the others wait."""

    def save(self) -> None:
        started = time.perf_counter()
        if self.setting.run.is_root:
            partial = self.setting.folder / "partial.pt"
            with partial.open("wb") as file:
                torch.save(self.setting.state(), file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.setting.folder / "checkpoint.pt")
        self.setting.run.barrier()
        self.stalls_s.append(time.perf_counter() - started)
        self.writes_s.append(self.stalls_s[-1])


class Distributed(Saver):
    """torch.distributed.checkpoint's `async_save` on all ranks, which keeps its host memory from one to the next."""

    _KIND = AsyncCheckpointerType.THREAD
    _IN_SHARED_MEMORY = False

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._group = gloo_group(setting.run)
        self._stager = DefaultStager(StagingOptions(False, self._IN_SHARED_MEMORY, False, False))
        self._future: Future[Any] | None = None

    def save(self) -> None:
        started = time.perf_counter()
        if self._future is not None:
            self._future.result()
        future = async_save(
            self.setting.state(),
            checkpoint_id=self.setting.folder / str(len(self.stalls_s)),
            process_group=self._group,
            async_checkpointer_type=self._KIND,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)
        self.stalls_s.append(time.perf_counter() - started)
        future.add_done_callback(lambda _: self.writes_s.append(time.perf_counter() - started))
        self._future = future

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
        super().wait()


class DistributedProcess(Distributed):
    """The same, written by a process beside each rank."""

    _KIND = AsyncCheckpointerType.PROCESS
    _IN_SHARED_MEMORY = True


def gloo_group(run: Run) -> dist.ProcessGroup:
    """Return a new group of all ranks of this host over Gloo. Collective."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("MASTER_ADDR", _LOOPBACK)  # of the writing processes' own group
        make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = make_store(_LOOPBACK, 0, is_master=True, wait_for_workers=False) if run.is_root else None
        port = run.broadcast(store.port if store else None)
        store = store or make_store(_LOOPBACK, port)
        dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.world_size)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return group


NONE, COPY, OURS = "none", "copy", "ours"
SAVERS: dict[str, tuple[str, Callable[[Setting], Saver]]] = {
    NONE: ("no checkpoints", Saver),
    COPY: ("copy in memory alone", Copy),
    OURS: ("**trainer**", Ours),
    "torch.save": ("`torch.save` on rank 0, fsync, barrier", TorchSave),
    "dcp-thread": ("DCP `async_save`, threads", Distributed),
    "dcp-process": ("DCP `async_save`, processes", DistributedProcess),
}
"""By name: the name of the row, and what makes it."""
