"""Put convolution weights, and an optimizer's state for them, in NHWC order (channels last)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def to_channels_last(model: nn.Module, optimizer: Optimizer) -> None:
    """Put the weights of 2-D convolutions in NHWC order, except those that a parametrization computes."""
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) and weight is not None:
            # Not `contiguous`, which keeps the strides of weights of a single channel: they are in both orders at once.
            weight.data = torch.empty_like(weight.data, memory_format=torch.channels_last).copy_(weight.data)
    align_state(optimizer)


def align_state(optimizer: Optimizer) -> None:
    """Give optimizer state of a parameter's shape the parameter's strides, which fused optimizers rely on."""
    for parameter, states in optimizer.state.items():
        for name, value in states.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                states[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
