"""Batches on their way to a device: what holds a tensor keeps its type, and what is not known stays as it is."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainer.data import batches
from trainer.data.batches import count_samples, move, pin
from trainer.data.loader import ShardedLoader

META = torch.device("meta")
X = torch.ones(3, 2)


class Point(NamedTuple):
    x: Any
    to: Any  # a field, and no method


class Encoding(UserDict[str, Any]):
    """As a tokenizer's."""

    def to(self, device: torch.device) -> Encoding:
        moved = Encoding({key: value.to(device) for key, value in self.items()})
        moved.was_asked = True  # type: ignore[attr-defined]
        return moved


@dataclass
class Node:
    """With a field that is not set, and one for any object."""

    x: Tensor
    parent: Node | None = None
    unset: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    name: str = "a"


def defaults() -> defaultdict[str, Any]:
    value: defaultdict[str, Any] = defaultdict(list)
    value["x"].append(X)
    return value


MOVED = {
    "dict": {"x": [X, "text", None], 1: (X, 3)},
    "defaultdict": defaults(),
    "OrderedDict": OrderedDict(y=1, x=X),
    "UserDict": UserDict(x=X),
    "named tuple": Point(X, X),
    "torch.return_types": torch.max(X, 0),
    "frozen dataclass": Frozen([X]),
    "with .to": Encoding(x=X),
    "packed sequence": pack_sequence([torch.ones(3), torch.ones(2)]),
}


def tensors_in(value: Any) -> list[Tensor]:
    """What a user would find, by the value's own ways; not by those of the library."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    return tensors_in(value.x) if isinstance(value, Frozen) else []


@pytest.mark.parametrize("kind", MOVED)
def test_every_tensor_in_a_batch_is_moved_and_the_batch_stays_what_it_was(kind: str) -> None:
    value = MOVED[kind]
    before, text = tensors_in(value), repr(value)
    moved = move([value], META)[0]
    assert type(moved) is type(value)
    assert [tensor.device for tensor in tensors_in(moved)] == [META] * len(before)
    assert before
    assert repr(value) == text, "the value itself, which may be the dataset's"
    assert move(value, torch.device("cpu")) is value or kind == "with .to", "nothing is made anew where nothing moves"


def test_what_a_class_adds_to_its_items_is_kept() -> None:
    assert move(defaults(), META)["new"] == []
    assert list(move(MOVED["OrderedDict"], META)) == ["y", "x"]
    assert move(Encoding(x=X), META).was_asked
    assert move(Point(X, len), META).x.device == META
    assert move(MOVED["packed sequence"], META).batch_sizes.device.type == "cpu"


@pytest.mark.parametrize("value", ["text", b"bytes", 3, None, Tensor, Frozen, np.ones(2), range(3), object(), {1, 2}])
def test_what_is_not_known_is_left_as_it_is(value: Any) -> None:
    moved = move({"value": value, "x": X}, META)
    assert moved["value"] is value
    assert moved["x"].device == META


def test_pinning_leaves_what_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    pinned = pin({"x": Point(1, X), "y": X.to_sparse(), "z": X.to(META), "text": "text"})
    assert type(pinned["x"]) is Point
    assert torch.equal(pinned["x"].to, X + 1)
    assert pinned["y"].layout is torch.sparse_coo


def test_a_loader_pins_by_itself_what_its_collate_function_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    # As on a machine with a GPU.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    (batch,) = ShardedLoader([torch.ones(2)], 1, collate_fn=lambda rows: Point(rows[0], None), pin_memory=True)
    assert type(batch) is Point
    assert batch.x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("value", "samples"),
    [
        (X, 3),
        ({"name": "a", "scalar": torch.tensor(5), "deep": [(torch.zeros(4, 1), X)]}, 4),
        (Frozen({"x": torch.zeros(0)}), 0),
        (MOVED["packed sequence"], 2),
        (Encoding(x=X), 3),
        ({"scalar": torch.tensor(5)}, -1),
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_tensor_is_long(value: Any, samples: int) -> None:
    assert count_samples(value) == samples


def test_tensors_are_found_in_their_order_whatever_a_batch_or_an_input_holds() -> None:
    first, second, third, fourth = (torch.tensor(number) for number in range(4))
    shared = MappingProxyType({"a": first, "b": [second]})
    node = Node(third)
    node.parent = node
    assert list(batches.tensors_in((shared, {"c": node, "again": shared}, "text", fourth))) == [
        first,
        second,
        third,
        fourth,
    ]
