"""Gradient synchronization by Horovod's DistributedOptimizer, over NCCL between GPUs and MPI or Gloo between CPUs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.launch.environment import user_set
from trainer.launch.failure import at_exit
from trainer.launch.world import World
from trainer.strategies import horovod_broadcast
from trainer.strategies.adasum import AdasumSynchronizer
from trainer.strategies.base import NamedParameters, Strategy, Synchronizer, in_place
from trainer.strategies.buckets import BUCKET_BYTES, divide
from trainer.strategies.gradient_guard import GradientGuard
from trainer.tuning import tune

_REDUCIBLE = (torch.float16, torch.float32, torch.float64)
_NUMBERS = itertools.count()
_VALID_LAUNCHERS = "valid launchers are horovodrun, mpirun and srun --mpi=pmix, or take strategy 'ddp'"
_UNTIL_ASKED = 2**62
"""Backward passes after which Horovod would send a gradient by itself."""


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
        if world.launcher == "torchrun" and world.size > 1:
            # MPI would start as a job of one rank, and end this process where it cannot.
            raise ConfigError(f"strategy 'horovod' cannot join the ranks that torchrun started; {_VALID_LAUNCHERS}")
        # Horovod and Open MPI read these when they start, so they are set before they are imported.
        self.tuning = tune(world, horovod=True)
        self._hvd = _import_horovod()
        self._check_build()
        self._hvd.init()
        self._closed = False
        self._started: set[int] = set()
        at_exit(self._finish_started)
        self._check_world()
        self.is_over_nccl = world.device.type == "cuda"
        self.description = f"Horovod over {self._transport()}, {world}"

    def _transport(self) -> str:
        controller = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        return f"NCCL (started by {controller})" if self.is_over_nccl else controller

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
                f"{_VALID_LAUNCHERS}"
            )

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        hvd = self._hvd
        if config.reduction == "adasum" and not hvd.mpi_enabled():
            raise ConfigError(
                "reduction is 'adasum', which Horovod has over MPI only; start with "
                "`horovodrun --mpi`, or take reduction 'average'"
            )
        self._check_types(parameters, config)
        self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
        compression = _AnyOrder(hvd.Compression.fp16 if config.compression == "fp16" else hvd.Compression.none)
        if config.reduction == "adasum":
            return AdasumSynchronizer(hvd, model, _with_own_names(parameters), compression)
        if not parameters:
            return Synchronizer(model)
        guard = GradientGuard(parameters, ranks_may_differ=config.dynamic_graph)
        return HorovodSynchronizer(hvd, model, parameters, guard, compression, self._groups(model, parameters, config))

    def _check_types(self, parameters: NamedParameters, config: RunConfig) -> None:
        for name, parameter in parameters:
            if parameter.dtype not in _REDUCIBLE:
                raise ConfigError(
                    f"parameter {name} is of type {parameter.dtype}, which Horovod cannot all-reduce; "
                    "keep weights in float32 and set precision to bf16"
                )
        if config.reduction == "adasum" and self.world.size & (self.world.size - 1):
            raise ConfigError(
                f"reduction is 'adasum', which needs a power of two ranks, and there are {self.world.size}"
            )

    def _groups(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> list[list[Tensor]] | None:
        # A group is sent when its last gradient is there. It would hang where ranks leave different parameters
        # without a gradient. Sparse gradients support no groups.
        sparse = any(getattr(module, "sparse", False) for module in model.modules())
        if config.dynamic_graph or sparse:
            return None
        return gradient_groups([parameter for _, parameter in parameters], over_nccl=self.is_over_nccl)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return in_place(partial(self._hvd.allreduce_, op=self._hvd.Sum), tensor)

    def send_gradients(self, flat: Tensor, name: str) -> Tensor:
        # Under a name that it has seen before, Horovod negotiates a tensor with one bit.
        reduced: Tensor = self._hvd.allreduce_(flat, op=self._hvd.Sum, name=f"trainer.{name}")
        return reduced

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        handle = self._hvd.allreduce_async_(flat, op=self._hvd.Sum, name=f"trainer.{name}")
        self._started.add(handle)

        def wait() -> Tensor:
            self._started.discard(handle)
            reduced: Tensor = self._hvd.synchronize(handle)
            return reduced

        return wait

    def broadcast(self, tensor: Tensor) -> Tensor:
        self.broadcast_tensors([tensor])
        return tensor

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        horovod_broadcast.broadcast_tensors(self._hvd, tensors)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return horovod_broadcast.broadcast_object(self._hvd, value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        return horovod_broadcast.all_gather_object(self._hvd, value)

    def barrier(self) -> None:
        self._hvd.barrier()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._finish_started()
            self._hvd.shutdown()

    def _finish_started(self) -> None:
        # The shutdown of one rank ends what others have not begun.
        while self._started:
            self._hvd.synchronize(self._started.pop())


class HorovodSynchronizer(Synchronizer):
    """Horovod's DistributedOptimizer, used for the gradients alone.

    It is made over the same parameters as the user's optimizer, which keeps its class, its state and its schedulers,
    and which takes the steps. Horovod would make another optimizer of it.

    Args:
        parameters: those whose gradients are all-reduced.
        guard: of these parameters.
        groups: parameters whose gradients are sent together; None sends in each cycle what is ready.
    """

    def __init__(
        self,
        hvd: Any,
        model: nn.Module,
        parameters: NamedParameters,
        guard: GradientGuard,
        compression: Any,
        groups: list[list[Tensor]] | None,
    ) -> None:
        super().__init__(model)
        self._guard = guard
        self._sum = partial(hvd.allreduce_, op=hvd.Sum, name="trainer.present")
        self._in_flight = self._done = self._local = False
        self._distributed = hvd.DistributedOptimizer(
            SGD([parameter for _, parameter in parameters], lr=0.0),
            named_parameters=_with_own_names(parameters),
            compression=compression,
            groups=groups,
        )
        self.retire = partial(self._distributed.set_backward_passes_per_step, _UNTIL_ASKED)

    def keep_local(self, local: bool) -> None:
        if local != self._local:
            self._local = local
            self._distributed.set_backward_passes_per_step(_UNTIL_ASKED if local else 1)

    def before_backward(self) -> None:
        if self._in_flight:
            self._guard.complete(self._wait, self._sum, between_passes=True)
        self._done = False
        self._in_flight = not self._local  # also where the backward pass ends in an error

    def after_backward(self) -> None:
        # A model that this pass has not reached has nothing to wait for.
        self._in_flight = not self._local and (self._guard.ranks_may_differ or self._has_sent())
        if self._in_flight:
            self._guard.note()

    def _has_sent(self) -> bool:
        return bool(self._distributed._handles)

    def finish(self) -> None:
        if not self._done:
            self._guard.complete(self._wait, self._sum)

    def _wait(self, dropped: Iterable[nn.Parameter]) -> None:
        for parameter in dropped:
            parameter.grad = torch.empty_like(parameter)  # Horovod assigns what it has sent to the gradient
        self._distributed.synchronize()
        self._in_flight, self._done = False, True

    def reopen(self) -> None:
        self._done = False


def gradient_groups(parameters: Sequence[Tensor], *, over_nccl: bool) -> list[list[Tensor]] | None:
    """Return the parameters whose gradients are sent together; None sends in each cycle what is ready.

    Ranks on CPUs send buckets: to send each gradient once it is ready, all ranks negotiate again and again, in threads
    that take cores from the backward pass. Measured on CPUs only; between GPUs a large model keeps Horovod's own way.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return None if over_nccl and size > BUCKET_BYTES else divide(parameters)


class _AnyOrder:
    """Horovod's compression, for tensors in any order of memory. Horovod itself takes contiguous ones only.

    One in another order, the gradient of a channels-last weight say, is sent as a contiguous copy and written back.
    A rank may have no gradient, for which Horovod makes a contiguous one: so all send the same order.
    """

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, tensor: Tensor) -> tuple[Tensor, tuple[Any, Tensor]]:
        if tensor.is_sparse:
            raise ConfigError(
                f"a gradient of shape {tuple(tensor.shape)} is sparse, and no module has sparse=True, so Horovod was "
                "to send it in a bucket; set dynamic_graph to True, which sends each gradient by itself"
            )
        sent, context = self._compression.compress(tensor.contiguous())
        return sent, (context, tensor)

    def decompress(self, sent: Tensor, context: tuple[Any, Tensor] | None) -> Tensor:
        if context is None:  # a sparse gradient, which Horovod gathers uncompressed
            return sent
        found: Tensor = self._compression.decompress(sent, context[0])
        return found if context[1].is_contiguous() else context[1].copy_(found)


def _with_own_names(parameters: NamedParameters) -> NamedParameters:
    """Return names that no other prepared model uses, because Horovod sends each tensor under its name."""
    number = next(_NUMBERS)
    return [(f"{name}.{number}", parameter) for name, parameter in parameters]


def _import_horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        # Something else of that name was found first, in the script's own folder as a rule.
        other = sys.modules.get("horovod") if error.name == "horovod.torch" else None
        if other is not None:
            raise ConfigError(f"{other.__file__} is imported in place of the package horovod; rename it") from None
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
