"""Strategy "fsdp" without ranks: its settings, and which modules are gathered one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchvision.models import resnet18

from examples.transformer import Transformer
from trainer import ConfigError, FsdpConfig
from trainer.cluster.world import World
from trainer.strategies.fsdp import FSDPStrategy, check_model, find_blocks


def names_of(model: nn.Module, blocks: str | tuple[str, ...]) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in find_blocks(model, blocks)]


class Tied(nn.Module):
    """An embedding that is the output layer as well, around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.logits = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.logits.weight = self.embedding.weight


class Shared(nn.Module):
    """Two blocks, of which the first one's layer is called by the model as well."""

    def __init__(self, *, is_named_first: bool) -> None:
        super().__init__()
        layer = nn.Linear(2, 2)
        blocks = nn.ModuleList(nn.Sequential(part) for part in (layer, nn.Linear(2, 2)))
        parts: list[tuple[str, nn.Module]] = [("head", layer), ("blocks", blocks)]
        for name, part in parts if is_named_first else reversed(parts):
            self.add_module(name, part)


def two_stacks() -> nn.ModuleDict:
    return nn.ModuleDict({side: nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for side in ("left", "right")})


def shared_by_two(*blocks: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({side: nn.ModuleList(blocks) for side in ("left", "right")})


@pytest.mark.parametrize(
    ("make", "blocks", "expected"),
    [
        (lambda: Transformer(16, 3, 2, 8), "auto", ["blocks.0", "blocks.1", "blocks.2"]),
        (lambda: Transformer(16, 1, 2, 8), "auto", []),  # nothing is repeated
        (lambda: Transformer(16, 2, 2, 8), ("Block", "Embedding"), ["embedding", "blocks.0", "blocks.1"]),
        (lambda: Transformer(16, 2, 2, 8), (), []),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()), "auto", ["0", "2"]),
        (lambda: resnet18(), "auto", [f"layer{layer}.{block}" for layer in range(1, 5) for block in range(2)]),
        (lambda: two_stacks(), "auto", ["left.0", "left.1", "right.0", "right.1"]),
        # A block within a block is gathered with it.
        (lambda: nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]), ("Sequential", "Linear"), ["0"]),
        # A block that two parts hold is one block.
        (lambda: shared_by_two(nn.Linear(2, 2)), ("Linear",), ["left.0"]),
        (lambda: shared_by_two(nn.Linear(2, 2), nn.Linear(2, 2)), "auto", ["left.0", "left.1"]),
    ],
)
def test_blocks_are_found_by_repetition_or_by_name(
    make: Callable[[], nn.Module], blocks: str | tuple[str, ...], expected: list[str]
) -> None:
    assert names_of(make(), blocks) == expected


def test_parameters_that_blocks_do_not_share_may_be_tied() -> None:
    tied = Tied()
    check_model(tied, find_blocks(tied, "auto"), FsdpConfig())
    with pytest.raises(ConfigError, match=r"^parameter weight of the rest of the model is one of embedding as well"):
        check_model(tied, find_blocks(tied, ("Embedding",)), FsdpConfig())


@pytest.mark.parametrize("is_named_first", [True, False])
def test_a_layer_of_a_block_that_the_model_calls_as_well_is_refused(is_named_first: bool) -> None:
    model = Shared(is_named_first=is_named_first)
    with pytest.raises(ConfigError, match=r"parameter weight of the rest of the model is one of blocks\.0 as well"):
        check_model(model, find_blocks(model, ("Sequential",)), FsdpConfig())


def test_batch_norm_in_blocks_that_are_computed_twice_is_refused() -> None:
    model = resnet18()
    with pytest.raises(ConfigError, match="a BatchNorm in one would count each batch twice"):
        check_model(model, find_blocks(model, "auto"), FsdpConfig(checkpoint_activations=True))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"blocks": "Block"}, r"fsdp's blocks is 'Block'; valid are auto, and a tuple of class names"),
        ({"parameter_dtype": "fp16"}, r"fsdp's parameter_dtype is 'fp16'; valid are None, bf16"),
        ({"reduce_dtype": "int8"}, r"fsdp's reduce_dtype is 'int8'; valid are None, fp32, bf16"),
        ({"shard_over": "rack"}, r"fsdp's shard_over is 'rack'; valid are all, host, and a number of ranks"),
        ({"shard_over": 0}, r"fsdp's shard_over is 0"),
        ({"shard_over": True}, r"fsdp's shard_over is True"),
        ({"shard_over": 0, "reduce_dtype": "x"}, r"reduce_dtype is 'x'.*; fsdp's shard_over is 0"),
    ],
)
def test_settings_that_are_not_valid_are_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FsdpConfig(**settings)


def test_an_older_pytorch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(ConfigError, match=r"'fsdp' needs PyTorch 2\.13 or newer, and this is 2\."):
        FSDPStrategy(World())
