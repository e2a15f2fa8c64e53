"""Gather the rows of all ranks for a loss over all of them, such as a contrastive loss, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import ConfigError
from trainer.models.global_batch import GlobalBatch
from trainer.strategies.base import Strategy


def gather_rows(tensor: Tensor, batch: GlobalBatch, strategy: Strategy) -> list[Tensor]:
    """Return all ranks' rows, in rank order; a rank's rows get the sum of all ranks' gradients. Collective.

    Ranks may have unequal numbers of rows. A rank that computes on a padding batch adds none: it sees its
    own, the other ranks don't.

    Raises:
        ConfigError: the ranks' tensors differ in more than the number of rows.
    """
    if not tensor.dim():
        raise ConfigError("run.all_gather(…, differentiable=True) takes rows: a tensor of at least one dimension")
    rows = tensor if batch.counts else tensor[:0]
    kinds = strategy.all_gather_object((tuple(rows.shape[1:]), rows.dtype, len(rows)))
    if len({kind[:2] for kind in kinds}) > 1:
        told = ", ".join(f"{[count, *shape]} of {dtype}" for shape, dtype, count in kinds)
        raise ConfigError(f"run.all_gather takes rows of one shape and type from all ranks; they have {told}")
    counts, rank = [count for _, _, count in kinds], strategy.world.rank
    sent = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    around = (sum(counts[:rank]), sum(counts[rank + 1 :]))
    # A sum to which each rank adds its rows between zeros: its backward pass is the sum of the ranks' gradients.
    whole = batch.sum(F.pad(sent, (0, 0) * (rows.dim() - 1) + around), strategy.all_reduce)
    parts = list(whole.to(rows.dtype).split(counts))
    if not batch.counts:
        parts[rank] = tensor  # its loss, which counts nothing, may look for its rows
    return parts
