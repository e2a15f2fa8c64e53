"""Snapshots: private copies that can be loaded again as data."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainer import TrainerError
from trainer.checkpoint.run.snapshot import Snapshot

CPU = torch.device("cpu")


def loaded(state: dict[str, object]) -> dict[str, object]:
    """Return a state as it is after a file of PyTorch's, read as data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    result: dict[str, object] = torch.load(file, weights_only=True)
    return result


def test_a_snapshot_keeps_its_values_until_the_next_uses_its_memory() -> None:
    snapshot, weight = Snapshot(), torch.ones(3)
    first = snapshot.copy({"weights": [weight]})["weights"][0]
    weight.mul_(2)
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert snapshot.copy({"weights": [weight]})["weights"][0].data_ptr() == first.data_ptr()
    assert snapshot.copy({"weights": [torch.zeros(4).double()]})["weights"][0].dtype == torch.float64


def test_a_modules_versions_are_kept() -> None:
    copied = loaded(Snapshot().copy({"model": nn.BatchNorm1d(2).state_dict()}))["model"]
    assert copied._metadata[""] == {"version": 2}  # type: ignore[attr-defined]


def test_tied_weights_are_copied_once_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    snapshot = Snapshot()
    copied = loaded(snapshot.copy({"model": model.state_dict()}))["model"]
    assert isinstance(copied, OrderedDict)
    assert copied["0.weight"].data_ptr() == copied["1.weight"].data_ptr()


def test_layout_and_type_are_kept() -> None:
    state = {
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "view": torch.arange(6.0).reshape(2, 3).t(),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(2).to_sparse(),
        "device": CPU,
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "numpy": np.float64(0.5),
        "tuple": (1, None, {"a": {1, 2}}),
    }
    copied = loaded(Snapshot().copy(state))
    for name in ("channels last", "bfloat16", "view", "empty"):
        torch.testing.assert_close(copied[name], state[name])
        assert copied[name].stride() == state[name].stride()  # type: ignore[attr-defined]
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(2))  # type: ignore[attr-defined]
    for name in ("device", "dtype", "size", "numpy", "tuple"):
        assert copied[name] == state[name]
    assert type(copied["numpy"]) is float


@pytest.mark.parametrize("value", [Path("x"), np.ones(2), re.NOFLAG, object()], ids=type)
def test_what_cannot_be_loaded_as_data_is_named(value: object) -> None:
    kind = type(value).__name__
    with pytest.raises(TrainerError, match=rf"^objects\.schedule\.last of the checkpoint's state is a {kind}, which"):
        Snapshot().copy({"objects": {"schedule": {"last": value}}})
