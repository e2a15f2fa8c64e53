"""All-reduce of a value of the user's, whatever its type is and the transport can add."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.strategies.base import Strategy

# What not every transport adds, or what a sum of several ranks does not fit in.
_SENT_AS = {
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16), torch.int64),
    torch.bfloat16: torch.float32,
}


def all_reduce(strategy: Strategy, value: Tensor | float, reduction: str) -> Tensor:
    """Return the mean or the sum of `value` over all ranks, as a new tensor on this rank's device. Collective.

    Raises:
        ConfigError: `reduction` is neither "mean" nor "sum".
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction is {reduction!r}; valid are mean, sum")
    world = strategy.world
    own = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device=world.device)
    if own.is_complex():
        return torch.view_as_complex(all_reduce(strategy, torch.view_as_real(own.detach()), reduction))
    sent = own.detach().to(_SENT_AS.get(own.dtype, own.dtype)).clone(memory_format=torch.contiguous_format)
    total = strategy.all_reduce(sent)
    total = total if reduction == "sum" else total / world.size
    return total.to(own.dtype) if own.dtype == torch.bfloat16 else total
