"""In how many groups Horovod sends the gradients of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.tuning.horovod import ONE_GROUP_BYTES, gradient_groups


def model_of(parameters: int, *, frozen: int = 0) -> nn.Module:
    model = nn.Module()
    model.register_parameter("trained", nn.Parameter(torch.empty(parameters, device="meta")))
    model.register_parameter("frozen", nn.Parameter(torch.empty(frozen, device="meta"), requires_grad=False))
    return model


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (model_of(10), 1),
        (model_of(ONE_GROUP_BYTES // 4), 1),
        (model_of(ONE_GROUP_BYTES // 4 + 1), None),
        (model_of(10, frozen=ONE_GROUP_BYTES), 1),
        (model_of(ONE_GROUP_BYTES // 4).double(), None),
        (model_of(ONE_GROUP_BYTES // 2).half(), 1),
    ],
    ids=["tiny", "at the limit", "above it", "frozen above it", "float64 above it", "float16 at it"],
)
def test_small_models_send_their_gradients_as_one_group(model: nn.Module, groups: int | None) -> None:
    assert gradient_groups(model) == groups
