"""Gradient synchronization by Horovod's DistributedOptimizer, over NCCL between GPUs and MPI or Gloo between CPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.launch.environment import user_set
from trainer.launch.world import World
from trainer.strategies.base import Strategy, broadcast_optimizer_state
from trainer.tuning import tune
from trainer.tuning.horovod import gradient_groups

_REDUCIBLE = (torch.float16, torch.float32, torch.float64)


class HorovodStrategy(Strategy):
    """Horovod, set up for this host.

    Raises:
        ConfigError: Horovod is not installed, was built without NCCL although this rank has a GPU, or does
            not see the ranks that the launcher started.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        if world.launcher == "srun" and not user_set("PMIX_RANK"):
            raise ConfigError(
                "srun started these ranks without PMIx, so MPI cannot connect them; start with `srun --mpi=pmix`, "
                "or take horovodrun inside the allocation"
            )
        # Horovod and Open MPI read these when they start, so they are set before they are imported.
        self.tuning = tune(world, horovod=True)
        self._hvd = _import_horovod()
        self._check_build()
        self._hvd.init()
        self._closed = False
        self._check_world()
        self.description = f"Horovod over {self._transport()}, {world}"

    def _transport(self) -> str:
        controller = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        return f"NCCL (started by {controller})" if self.world.device.type == "cuda" else controller

    def _check_build(self) -> None:
        if self.world.device.type == "cuda" and not self._hvd.nccl_built():
            raise ConfigError(
                "this Horovod was built without NCCL, but this host has a GPU; rebuild it with "
                "`python scripts/install/build_horovod.py --gpu nccl`, or train on the CPU (device 'cpu')"
            )

    def _check_world(self) -> None:
        found = (self._hvd.rank(), self._hvd.size())
        if found != (self.world.rank, self.world.size):
            raise ConfigError(
                f"strategy 'horovod' cannot join the ranks that {self.world.launcher} started: this is rank "
                f"{self.world.rank} of {self.world.size} there, and {found[0]} of {found[1]} in Horovod; "
                "valid launchers are horovodrun, mpirun and srun --mpi=pmix, or take strategy 'ddp'"
            )

    def prepare(self, model: nn.Module, optimizer: Optimizer, config: TrainerConfig) -> tuple[nn.Module, Optimizer]:
        hvd = self._hvd
        if config.reduction == "adasum" and not hvd.mpi_enabled():
            raise ConfigError(
                "reduction is 'adasum', which Horovod has over MPI only; start with "
                "`horovodrun --mpi`, or take reduction 'average'"
            )
        self._check_types(model, config)
        self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
        broadcast_optimizer_state(self, optimizer)
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=_names_of(model, optimizer),
            compression=hvd.Compression.fp16 if config.compression == "fp16" else hvd.Compression.none,
            op=hvd.Adasum if config.reduction == "adasum" else hvd.Average,
            groups=self._groups(model, config),
        )
        # Horovod makes a new optimizer from the old one's settings, without its state.
        wrapped.state.update(optimizer.state)
        return model, wrapped

    def _check_types(self, model: nn.Module, config: TrainerConfig) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype not in _REDUCIBLE:
                raise ConfigError(
                    f"parameter {name} is of type {parameter.dtype}, which Horovod cannot all-reduce; "
                    "keep weights in float32 and set precision to bf16"
                )
        if config.reduction == "adasum" and self.world.size & (self.world.size - 1):
            raise ConfigError(
                f"reduction is 'adasum', which needs a power of two ranks, and there are {self.world.size}"
            )

    def _groups(self, model: nn.Module, config: TrainerConfig) -> int | None:
        # A group is sent when its last gradient is there. It would hang where ranks leave different parameters
        # without a gradient. Adasum's optimizer and sparse gradients support no groups.
        sparse = any(getattr(module, "sparse", False) for module in model.modules())
        if config.dynamic_graph or sparse or config.reduction == "adasum":
            return None
        return gradient_groups(model)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        reduced: Tensor = self._hvd.allreduce_(tensor, op=self._hvd.Sum)
        return reduced

    def broadcast(self, tensor: Tensor) -> Tensor:
        self.broadcast_tensors([tensor])
        return tensor

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        # As bytes, because Horovod supports neither bool nor bfloat16; contiguous, because it requires that.
        pairs = [(tensor, tensor.contiguous()) for tensor in tensors]
        # All are submitted before the first is waited for, so that Horovod negotiates them together.
        handles = [
            self._hvd.broadcast_async_(whole.view(-1).view(torch.uint8), root_rank=0, name=f"trainer.tensor.{number}")
            for number, (_, whole) in enumerate(pairs)
        ]
        for handle in handles:
            self._hvd.synchronize(handle)
        for tensor, whole in pairs:
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        # By default Horovod names the broadcast after the value's type, and ranks whose values differ in type hang.
        return self._hvd.broadcast_object(value, root_rank=root, name="trainer.object")

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered: list[Any] = self._hvd.allgather_object(value, name="trainer.objects")
        return gathered

    def barrier(self) -> None:
        self._hvd.barrier()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hvd.shutdown()

    def synchronize(self, optimizer: Optimizer) -> None:
        optimizer.synchronize()  # type: ignore[attr-defined]  # Horovod's wrapper has it

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        with optimizer.skip_synchronize():  # type: ignore[attr-defined]
            super().step(optimizer, scaler)

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Raise the number of backward passes per step, after which Horovod all-reduces a gradient, by one."""
        optimizer.set_backward_passes_per_step(2)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            optimizer.set_backward_passes_per_step(1)  # type: ignore[attr-defined]


def _import_horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(
            f"strategy 'horovod' needs Horovod ({error}); install it with "
            "`python scripts/install/build_horovod.py`, or take strategy 'ddp' under torchrun"
        ) from None
    if not hasattr(hvd, "init"):
        # Horovod only prints a warning when its native library does not load.
        raise ConfigError(
            "Horovod's native library does not load in this environment; build it anew with "
            "`python scripts/install/build_horovod.py`"
        )
    return hvd


def _names_of(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return names for the optimizer's parameters; Horovod sends each gradient under its name."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in held]
