"""Parameters and gradients of an optimizer, and a way to tell which gradients have changed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

Marks = dict[nn.Parameter, tuple[Tensor, int]]
"""From a parameter to its gradient and PyTorch's count of the gradient's changes. They are kept alive, so that a new
gradient in the same memory is not taken for the old."""


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def mark(parameters: Iterable[nn.Parameter]) -> Marks:
    """Remember the gradients that these parameters have now."""
    return {
        parameter: (parameter.grad, parameter.grad._version) for parameter in parameters if parameter.grad is not None
    }


def has_changed(parameter: nn.Parameter, marks: Marks) -> bool:
    """Return whether a parameter's gradient was replaced or written to since it was marked."""
    gradient, version = marks.get(parameter, (None, 0))
    return parameter.grad is not gradient or (gradient is not None and gradient._version != version)
