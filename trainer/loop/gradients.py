"""Parameters and gradients of an optimizer, and which gradients have changed since they were marked."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

Marks = dict[nn.Parameter, tuple[Tensor, int]]
"""Gradients by their parameter, each with PyTorch's count of its changes. The tensors are kept, so none is taken for
another that has got its memory."""


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that the optimizer's parameters have."""
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def mark(parameters: Iterable[nn.Parameter]) -> Marks:
    """Mark the gradients that these parameters have now."""
    return {
        parameter: (parameter.grad, parameter.grad._version) for parameter in parameters if parameter.grad is not None
    }


def has_changed(parameter: nn.Parameter, marks: Marks) -> bool:
    """Return whether a parameter's gradient is another one than the marked one, or was written to since."""
    gradient, version = marks.get(parameter, (None, 0))
    return parameter.grad is not gradient or (gradient is not None and gradient._version != version)
