"""Gradient synchronization by Horovod's DistributedOptimizer, over NCCL between GPUs and MPI or Gloo between CPUs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from trainer.cluster.environment import user_set
from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.base import Strategy
from trainer.strategies.buckets import gradient_groups
from trainer.strategies.compress.whole_gradients import WIRE_TYPES
from trainer.strategies.gradients import (
    GradientSynchronizer,
    NamedParameters,
    Synchronizer,
    as_real,
    assign_means,
    is_shared,
)
from trainer.tuning import tune
from trainer.watch.heartbeat import BATCH_NORM, waits
from trainer.watch.spans import WAIT, in_span

_SENT_AS = {torch.bfloat16: torch.float32}
"""The type that is sent, without a compression, for a type in which sums would keep eight bits."""
_VALID_LAUNCHERS = "valid launchers are horovodrun, mpirun and srun --mpi=pmix, or take strategy 'ddp'"


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
            # MPI would start as a job of a single rank, and end this process where it cannot.
            raise ConfigError(f"strategy 'horovod' cannot join the ranks that torchrun started; {_VALID_LAUNCHERS}")
        # Horovod and Open MPI read these when they start, so they are set before they are imported.
        self.tuning = tune(world, horovod=True)
        self._hvd = hvd = _import_horovod()
        self._statistics = itertools.count()
        if world.device.type == "cuda" and not hvd.nccl_built():
            raise ConfigError(
                "this Horovod was built without NCCL, but this host has a GPU; compile it anew with "
                "HOROVOD_GPU_OPERATIONS=NCCL (docs/install.md), or train on the CPU (device 'cpu')"
            )
        hvd.init()
        if (hvd.rank(), hvd.size()) != (world.rank, world.size):
            raise ConfigError(
                f"strategy 'horovod' cannot join the ranks that {world.launcher} started: this is rank {world.rank} of "
                f"{world.size} there, and {hvd.rank()} of {hvd.size()} in Horovod; {_VALID_LAUNCHERS}"
            )
        controller = "MPI" if hvd.mpi_enabled() else "Gloo"
        transport = f"NCCL (started by {controller})" if world.device.type == "cuda" else controller
        self.description = f"Horovod over {transport}, {world}"

    def synchronize(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        modules = [module for module in model.modules() if getattr(module, "sparse", False)]
        sparse = {parameter for module in modules for parameter in module.parameters(recurse=False)}
        held, over_nccl = [parameter for _, parameter in parameters], self.world.device.type == "cuda"
        # Horovod has no groups with sparse gradients.
        groups = None if sparse else gradient_groups(held, over_nccl=over_nccl)
        return HorovodSynchronizer(self._hvd, parameters, WIRE_TYPES.get(config.compression), groups, sparse)

    def sum_statistics(self, tensor: Tensor) -> Tensor:
        # Within a pass, while Horovod's NCCL sums gradients: a second communicator of NCCL's could deadlock there.
        if self.world.device.type == "cpu":
            return super().sum_statistics(tensor)
        with waits(BATCH_NORM, tensor.numel(), counts=True):
            # Horovod numbers unnamed tensors by each rank's calls: a user's call on some ranks only would shift them.
            summed = tensor.contiguous()
            self.start_gradients(summed, f"statistics.{next(self._statistics)}")()
            return summed

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        # Under a name that it has seen before, Horovod negotiates a tensor with a single bit.
        handle = self._hvd.allreduce_async_(as_real(flat), op=self._hvd.Sum, name=f"trainer.{name}")
        return partial(self._hvd.synchronize, handle)

    def close(self) -> None:
        self._hvd.shutdown()  # does nothing the second time
        super().close()


class HorovodSynchronizer(GradientSynchronizer):
    """Horovod's DistributedOptimizer, used for the gradients alone.

    The user's optimizer keeps its class, its state and its schedulers, and takes the steps; Horovod would make another
    optimizer of it. Horovod's is made over placeholder parameters of the type that is sent, which get each parameter's
    gradient when it is complete: so it keeps no parameter, and sends after all of the user's hooks.

    Args:
        wire_type: type that is sent instead of the gradients' type; without one, bfloat16 is sent as float32. Complex
            numbers are sent as pairs of real numbers.
        groups: indices of parameters whose gradients are sent together; None sends in each cycle what is ready.
        sparse: parameters whose gradients are gathered, uncompressed.
    """

    def __init__(
        self,
        hvd: Any,
        parameters: NamedParameters,
        wire_type: torch.dtype | None,
        groups: list[list[int]] | None,
        sparse: Collection[Tensor],
    ) -> None:
        super().__init__(parameters)
        self._sparse = {index for index, (_, parameter) in enumerate(parameters) if parameter in sparse}
        self._placeholders = []  # which take no memory
        for _, parameter in parameters:
            numbers = as_real(parameter.detach())
            dtype = None if parameter in sparse else wire_type or _SENT_AS.get(numbers.dtype)
            self._placeholders.append(nn.Parameter(numbers.new_zeros(1, dtype=dtype).expand(numbers.shape)))
        sent_as = [f"{name}.{self.number}" for name in self.names]  # with other names than those of other models
        self._distributed = hvd.DistributedOptimizer(
            SGD(self._placeholders, lr=0.0),
            named_parameters=[*zip(sent_as, self._placeholders, strict=True)],
            groups=None if groups is None else [[self._placeholders[index] for index in group] for group in groups],
        )
        self._send = [self._distributed._make_hook(placeholder) for placeholder in self._placeholders]

    def on_gradient(self, index: int, parameter: nn.Parameter | None) -> None:
        placeholder, gradient = self._placeholders[index], None if parameter is None else parameter.grad
        if placeholder.grad is not None:
            raise self._completed_twice(index)
        if index in self._sparse:
            none = torch.empty(1, 0, device=self._device), placeholder.detach()[:0], placeholder.shape
            rows = torch.sparse_coo_tensor(*none, check_invariants=False) if gradient is None else gradient.detach()
            placeholder.grad = rows if rows.is_sparse else rows.to_sparse(1)  # dense if another layer has the weight
        elif gradient is None:
            # A sum is a negative zero where all of its terms are. That tells parameters without a gradient on any rank
            # from those whose gradient is zero, without a separate message.
            placeholder.grad = torch.full_like(placeholder, -0.0)
        else:
            own = gradient if gradient.layout is torch.strided else gradient.to_dense()
            own = own.detach().clone() if own.requires_grad or is_shared(own) else own
            # Contiguous as on ranks without a gradient, and because Horovod takes nothing else.
            placeholder.grad = as_real(own).to(placeholder.dtype).contiguous()
        self._send[index]()

    def complete(self) -> None:
        parameters = self.parameters
        for index, placeholder in enumerate(self._placeholders):
            if placeholder.grad is None:
                self.on_gradient(index, parameters[index])
        in_span(WAIT, self._distributed.synchronize)  # which replaces the values of the gradients
        dense: list[nn.Parameter] = []
        means: list[Tensor] = []
        for parameter, placeholder in zip(parameters, self._placeholders, strict=True):
            mean, placeholder.grad = placeholder.grad, None
            if parameter is None or mean is None or mean is parameter.grad:
                continue  # the last is common: the mean has taken the place of the gradient's values
            if not mean.is_sparse:
                dense.append(parameter)
                means.append(torch.view_as_complex(mean.to(parameter.real.dtype)) if parameter.is_complex() else mean)
            elif (mean := mean.coalesce()).values().numel():
                parameter.grad = mean if parameter.grad is None or parameter.grad.is_sparse else mean.to_dense()
        assign_means(dense, means, lambda index: bool(means[index].any()) or not _is_negative_zero(means[index]))


def _is_negative_zero(mean: Tensor) -> bool:
    return bool(as_real(mean).signbit().all())


def _import_horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        # Another module of that name was found first, usually in the script's folder.
        other = sys.modules.get("horovod") if error.name == "horovod.torch" else None
        if other is not None:
            raise ConfigError(f"{other.__file__} is imported in place of the package horovod; rename it") from None
        raise ConfigError(
            f"strategy 'horovod' needs Horovod ({error}); docs/install.md says how to install it; "
            "or take strategy 'ddp' under torchrun"
        ) from None
    if not hasattr(hvd, "init"):
        # Horovod only prints a warning when its native library does not load.
        raise ConfigError(
            "Horovod's native library does not load in this environment; compile it anew, as docs/install.md has it"
        )
    return hvd
