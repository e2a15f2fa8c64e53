"""Gradient synchronization by Horovod's DistributedOptimizer, over NCCL between GPUs and MPI or Gloo between CPUs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Sequence
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
from trainer.strategies.buckets import BUCKET_BYTES, divide
from trainer.strategies.compress.whole_gradients import WIRE_TYPES
from trainer.strategies.gradients import GradientSynchronizer, NamedParameters, Synchronizer, assign_means
from trainer.tuning import tune
from trainer.watch.heartbeat import BATCH_NORM, waits
from trainer.watch.spans import WAIT, span

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
        self._hvd = _import_horovod()
        self._check_build()
        self._hvd.init()
        self._closed = False
        self._statistics = itertools.count()
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
        rank, size = self._hvd.rank(), self._hvd.size()
        if (rank, size) != (self.world.rank, self.world.size):
            raise ConfigError(
                f"strategy 'horovod' cannot join the ranks that {self.world.launcher} started: this is rank "
                f"{self.world.rank} of {self.world.size} there, and {rank} of {size} in Horovod; "
                f"{_VALID_LAUNCHERS}"
            )

    def synchronize(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        hvd = self._hvd
        compression = _AnyTensor(WIRE_TYPES.get(config.compression))
        modules = [module for module in model.modules() if getattr(module, "sparse", False)]
        sparse = {parameter for module in modules for parameter in module.parameters(recurse=False)}
        held = [parameter for _, parameter in parameters]
        # Sparse gradients support no groups.
        groups = None if sparse else gradient_groups(held, over_nccl=self.world.device.type == "cuda")
        return HorovodSynchronizer(hvd, parameters, compression, groups, sparse)

    def sum_statistics(self, tensor: Tensor) -> Tensor:
        # Within a pass, while Horovod's NCCL sums gradients: a second communicator of NCCL's could deadlock there.
        if self.world.device.type == "cpu":
            return super().sum_statistics(tensor)
        with waits(BATCH_NORM, tensor.numel(), counts=True):
            # Horovod numbers unnamed tensors by each rank's calls: a user's call on some ranks only would shift them.
            name = f"trainer.statistics.{next(self._statistics)}"
            summed: Tensor = self._hvd.allreduce_(tensor.contiguous(), op=self._hvd.Sum, name=name)
            return summed

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        # Under a name that it has seen before, Horovod negotiates a tensor with a single bit.
        handle = self._hvd.allreduce_async_(_as_real(flat), op=self._hvd.Sum, name=f"trainer.{name}")
        return partial(self._hvd.synchronize, handle)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hvd.shutdown()
        super().close()


class HorovodSynchronizer(GradientSynchronizer):
    """Horovod's DistributedOptimizer, used for the gradients alone.

    The user's optimizer keeps its class, its state and its schedulers, and takes the steps; Horovod would make another
    optimizer of it. Horovod's is made over placeholder parameters, which get each parameter's gradient when it is
    complete: so it keeps no parameter, and sends after all of the user's hooks.

    Args:
        groups: indices of parameters whose gradients are sent together; None sends in each cycle what is ready.
        sparse: parameters whose gradients are sparse.
    """

    def __init__(
        self,
        hvd: Any,
        parameters: NamedParameters,
        compression: Any,
        groups: list[list[int]] | None,
        sparse: Collection[Tensor],
    ) -> None:
        super().__init__(parameters)
        self._sparse = {index for index, (_, parameter) in enumerate(parameters) if parameter in sparse}
        self._placeholders = [_placeholder(parameter) for _, parameter in parameters]
        self._distributed = hvd.DistributedOptimizer(
            SGD(self._placeholders, lr=0.0),
            # Horovod sends each tensor under its name.
            named_parameters=[
                (f"{name}.{self.number}", placeholder)
                for name, placeholder in zip(self.names, self._placeholders, strict=True)
            ],
            compression=compression,
            groups=None if groups is None else [[self._placeholders[index] for index in group] for group in groups],
        )
        self._send = [self._distributed._make_hook(placeholder) for placeholder in self._placeholders]
        self._sent: set[int] = set()

    def on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        if index in self._sent:
            raise self._completed_twice(index)
        self._sent.add(index)
        self._begin(index, parameter.grad)

    def _complete(self) -> None:
        parameters = self.parameters
        for index, parameter in enumerate(parameters):
            if index not in self._sent:
                self._begin(index, parameter.grad if parameter is not None else None)
        with span(WAIT):
            self._distributed.synchronize()  # which replaces the values of the gradients
        for parameter, placeholder in zip(parameters, self._placeholders, strict=True):
            mean, placeholder.grad = placeholder.grad, None
            if parameter is None or mean is None or parameter.grad is mean:
                continue
            if not mean.is_sparse:
                assign_means([parameter], [mean], lambda _, mean=mean: not _is_absent(mean))  # type: ignore[misc]
            elif mean._nnz():
                parameter.grad = mean
        self._sent.clear()

    def _begin(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            shape = self._shapes[index]
            gradient = _absent_like(shape, self._device)
            if index in self._sparse:
                gradient = torch.zeros(shape.shape, dtype=shape.dtype, device=self._device, layout=torch.sparse_coo)
        if gradient.is_sparse and index not in self._sparse:  # other ranks may have none, and send zeros
            gradient = gradient.to_dense()
        is_others = gradient.requires_grad or (not gradient.is_sparse and _is_shared(gradient))
        self._placeholders[index].grad = gradient.detach().clone() if is_others else gradient
        self._send[index]()


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_HOLDERS_OF_ONE = _holders(torch.zeros(1))


def _is_shared(gradient: Tensor) -> bool:
    """Return whether something else holds the gradient's memory: the running pass, which may still read it there.

    Of `h + position.unsqueeze(0)`, autograd gives `position` a view of the gradient of h.
    """
    return _holders(gradient) > _HOLDERS_OF_ONE


def _absent_like(shape: Tensor, device: torch.device) -> Tensor:
    """Return the tensor of negative zeros that is sent for a parameter without a gradient.

    A sum is a negative zero where all of its terms are. That tells parameters without a gradient on any rank from those
    whose gradient is zero, without a separate message.
    """
    return torch.full_like(shape, complex(-0.0, -0.0) if shape.is_complex() else -0.0, device=device)


def _is_absent(mean: Tensor) -> bool:
    numbers = _as_real(mean)
    return not bool(numbers.any()) and bool(numbers.signbit().all())


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter for the same gradients that takes no memory."""
    return nn.Parameter(parameter.detach().new_zeros(1).expand(parameter.shape))


def gradient_groups(parameters: Sequence[Tensor], *, over_nccl: bool) -> list[list[int]] | None:
    """Return the indices of parameters whose gradients are sent together; None sends in each cycle what is ready.

    Ranks on CPUs send buckets: to send each gradient once it is ready, all ranks negotiate again and again, in threads
    that take cores from the backward pass. Measured on CPUs only; between GPUs a large model keeps Horovod's default.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return None if over_nccl and size > BUCKET_BYTES else divide(parameters)


class _AnyTensor:
    """A compression, in Horovod's sense, for tensors of any type and in any order of memory.

    Horovod takes contiguous tensors of some types. A tensor in another order, such as the gradient of a channels-last
    weight, is sent as a contiguous copy and written back, because a rank without a gradient sends a contiguous tensor.
    Without a wire type bfloat16 is sent as float32; complex numbers are sent as pairs of real numbers.

    Args:
        wire_type: type that is sent instead of the gradients' type.
    """

    def __init__(self, wire_type: torch.dtype | None) -> None:
        self._wire_type = wire_type

    def compress(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        dense = _as_real(tensor)
        return dense.to(self._wire_type or _SENT_AS.get(dense.dtype, dense.dtype)).contiguous(), tensor

    def decompress(self, sent: Tensor, tensor: Tensor | None) -> Tensor:
        if tensor is None:  # a sparse gradient, which Horovod gathers uncompressed
            return sent
        _as_real(tensor).copy_(sent)  # `sent` is the tensor itself if nothing had to be converted
        return tensor


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _import_horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        # Another module of that name was found first, usually in the script's folder.
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
