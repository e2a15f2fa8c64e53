"""A model's weights in a file that other libraries read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from trainer import ConfigError, init


def tied() -> nn.Module:
    """A model with tied weights, a transposed one, an empty buffer and numbers of several types."""
    model = nn.Sequential(
        nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16()
    )
    model[1].weight = model[0].weight
    model.register_buffer("columns", torch.arange(6.0).view(2, 3).t())
    model.register_buffer("empty", torch.empty(0))
    return model


def test_every_name_of_a_state_is_there_and_readers_know_the_framework(tmp_path: Path) -> None:
    run, model, file = init("single"), tied(), tmp_path / "made" / "model.safetensors"
    run.save(run.state_dict(model), file)
    expected = model.state_dict()
    with safe_open(file, "pt") as found:
        assert found.metadata() == {"format": "pt"}
        assert set(found.keys()) == set(expected)
        for name, value in expected.items():
            assert torch.equal(found.get_tensor(name), value), name
            assert found.get_tensor(name).dtype == value.dtype
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("value", [{"epoch": 3, "weight": torch.ones(1)}, {"model": {}}, torch.ones(1), [1]])
def test_what_is_no_state_of_a_model_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors is for the state of a model, whose values are all"):
        init("single").save(value, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ConfigError, match="needs the package safetensors; install it, or name a file for torch"):
        init("single").save({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
