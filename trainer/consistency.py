"""Consistency checks: ranks compare model, optimizer and settings, so that a difference is an error and not a hang."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.launch.gpus import SHARING_HINT, gpu_id, sharing_is_on
from trainer.strategies.base import Strategy


def check_consistency(strategy: Strategy, facts: Mapping[str, object]) -> None:
    """Compare `facts` with rank 0's. Collective; raises the same error on every rank.

    Raises:
        ConfigError: a rank has another value than rank 0; the text names the fact, both ranks, hosts and values.
    """
    if strategy.world.size == 1:
        return
    by_rank = strategy.all_gather_object((socket.gethostname(), {name: str(fact) for name, fact in facts.items()}))
    root_host, expected = by_rank[0]
    for rank, (host, found) in enumerate(by_rank):
        for name in [*expected, *(name for name in found if name not in expected)]:
            if expected.get(name) != found.get(name):
                raise ConfigError(
                    f"ranks disagree about {name}: rank 0 on host {root_host} has {expected.get(name, 'none')}, "
                    f"rank {rank} on host {host} has {found.get(name, 'none')}; they must be the same everywhere"
                )


class PeriodicCheck:
    """Compares the ranks' optimizers and epochs at the optimizers' steps 0, 1, 2, 4, … 1024, 2048, 3072, …

    A scheduler that was stepped on one rank only, or with a loss that is one rank's, lets the ranks drift apart
    without an error. So does a loader that one rank alone has begun to iterate over.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._due = 0 if strategy.world.size > 1 else -1
        self._steps = 0
        self._strategy = strategy

    def compare_when_due(self, optimizers: Iterable[Optimizer], epoch: int) -> None:
        """Count a step, and compare with rank 0 where it is one of these. Collective then.

        Raises:
            ConfigError: a rank has another learning rate or other settings, or is in another epoch.
        """
        self._steps += 1
        if self._steps - 1 != self._due:
            return
        self._due = max(1, self._due + min(self._due, _AT_LEAST_EVERY))
        facts: dict[str, object] = {"the loader's epoch (from 0)": epoch}
        for number, optimizer in enumerate(optimizers):
            for name, value in describe_optimizer(optimizer).items():
                facts[f"{name} (optimizer {number})" if number else name] = value
        check_consistency(self._strategy, facts)


_AT_LEAST_EVERY = 1024


def check_devices(strategy: Strategy) -> None:
    """Find ranks that share a GPU without having been allowed to, which NCCL reports as an internal error. Collective.

    Raises:
        ConfigError: two ranks share a GPU.
    """
    own = (socket.gethostname(), gpu_id(strategy.world.device), sharing_is_on())
    owners: dict[str, tuple[int, bool]] = {}
    for rank, (host, gpu, may_share) in enumerate(strategy.all_gather_object(own)):
        if gpu is None:
            continue
        other, other_may = owners.setdefault(gpu, (rank, may_share))
        if other != rank and not (may_share and other_may):
            raise ConfigError(
                f"ranks {other} and {rank} share one GPU of host {host}; start at most as many ranks there as it has "
                f"GPUs; {SHARING_HINT}"
            )


def check_initialized(model: nn.Module) -> None:
    """Check that all parameters and buffers have a shape, which those of a lazy module get in its first forward pass.

    Raises:
        ConfigError: one has none yet.
    """
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise ConfigError(
                    f"{kind} {name} is of a lazy module and has no shape yet; run one forward pass on a sample input "
                    "before the model is prepared"
                )


def describe_model(model: nn.Module) -> dict[str, object]:
    """Describe every parameter and buffer by its type and shape, and parameters by their order of memory.

    Raises:
        ConfigError: one of them has no shape yet.
    """
    check_initialized(model)
    facts: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        facts[f"parameter {name}"] = _describe(parameter) + _describe_order(parameter) + frozen
    return facts | {f"buffer {name}": _describe(buffer) for name, buffer in model.named_buffers()}


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _describe_order(tensor: Tensor) -> str:
    if tensor.is_contiguous():
        return ""
    # The stride of a dimension of length 1 has no meaning, and depends on how the tensor was made.
    strides = [stride if length > 1 else 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return f", strides {strides}"


def describe_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """Describe the optimizer's class and each group's settings, without the parameters themselves."""
    facts: dict[str, object] = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"the number of parameters in the optimizer's group {number}"] = len(group["params"])
        for name, value in group.items():
            if name != "params":
                facts[f"{name} of the optimizer's group {number}"] = value
    return facts
