"""Batches of any kind on their way to a device: what holds a tensor keeps its type and its own ways; nothing fails."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainer.data.batches import count_samples, move, pin
from trainer.data.loader import ShardedLoader

META = torch.device("meta")
X = torch.ones(3, 2)


class Point(NamedTuple):
    x: Any
    to: Any  # a field, and no method


class Edge(Point):
    """A tuple that is made of something else than its items."""

    def __new__(cls, start: Any) -> Edge:
        return super().__new__(cls, start, start)


class Pair(tuple[Any, Any]):
    def __new__(cls, x: Any, y: Any) -> Pair:
        return super().__new__(cls, (x, y))


class Sized(dict[str, Any]):
    """Made of a number, and refuses to be changed later."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            raise TypeError("frozen")
        super().__setitem__(key, value)


class Attributes(dict[str, Any]):
    """A dict whose items are its attributes, as many write it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Wrapping(Mapping[str, Any]):
    """Cannot be changed, and is made of something else than a mapping."""

    def __init__(self, x: Any, y: Any) -> None:
        self._items = {"x": x, "y": y}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Encoding(UserDict[str, Any]):
    """As a tokenizer's."""

    def to(self, device: torch.device) -> Encoding:
        moved = Encoding({key: value.to(device) for key, value in self.items()})
        moved.was_asked = True  # type: ignore[attr-defined]
        return moved


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    name: str = "a"


@dataclass
class Derived:
    x: Any

    def __post_init__(self) -> None:
        self.same = self.x


class NotCopied(dict[str, Any]):
    def __copy__(self) -> NotCopied:
        raise RuntimeError("this one is mine")


def sized() -> Sized:
    value = Sized(3)
    value["x"] = X
    return value


def defaults() -> defaultdict[str, Any]:
    value: defaultdict[str, Any] = defaultdict(list)
    value["x"].append(X)
    return value


MOVED = {
    "dict": {"x": [X, "text", None], 1: (X, 3)},
    "defaultdict": defaults(),
    "OrderedDict": OrderedDict(y=1, x=X),
    "Counter": Counter({"x": X}),
    "UserDict": UserDict(x=X),
    "ChainMap": ChainMap[str, Any]({"y": 1}, {"x": X}),
    "mapping proxy": MappingProxyType({"x": X}),
    "dict of its own": sized(),
    "dict of attributes": Attributes(x=X, y=2),
    "mapping of its own": Wrapping(X, 2),
    "deque": deque([X, 1], maxlen=2),
    "UserList": UserList([X]),
    "named tuple": Point(X, X),
    "named tuple with __new__": Edge(X),
    "tuple with __new__": Pair(X, "y"),
    "torch.return_types": torch.max(X, 0),
    "frozen dataclass": Frozen(X),
    "dataclass": Derived({"x": X}),
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
    if isinstance(value, tuple | list | deque | UserList):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, Frozen | Derived):
        return [*tensors_in(value.x), *tensors_in(getattr(value, "same", None))]
    return []


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
    assert move(sized(), META).size == 3
    assert list(move(MOVED["OrderedDict"], META)) == ["y", "x"]
    assert move(deque([X, 1], maxlen=2), META).maxlen == 2
    attributes = move(Attributes(x=X, y=2), META)
    assert attributes.x is attributes["x"]
    attributes.z = 1
    assert attributes["z"] == 1
    assert move(MOVED["dataclass"], META).same["x"].device == META
    assert move(Encoding(x=X), META).was_asked
    point = Edge(X)
    point.start = point.x  # type: ignore[attr-defined]
    assert move(point, META).start.device == META
    assert move(Point(X, len), META).x.device == META
    assert move(MOVED["packed sequence"], META).batch_sizes.device.type == "cpu"


def test_a_tensor_that_comes_twice_stays_one() -> None:
    shared = [X]
    first, second = move(({"x": shared, "y": X}, Edge(shared)), META)
    assert first["x"] is second.x is second.to
    assert first["x"][0] is first["y"]


def test_what_holds_itself_ends() -> None:
    batch: dict[str, Any] = {"x": X}
    batch["self"] = batch
    assert move(batch, META)["x"].device == META
    assert count_samples({"self": batch}) == 3


@pytest.mark.parametrize(
    "value", ["text", b"bytes", 3, None, Tensor, Frozen, np.ones(2), range(3), NotCopied(x=X), object(), {1, 2}, ...]
)
def test_what_is_not_known_or_cannot_be_copied_is_left_as_it_is(value: Any) -> None:
    moved = move({"value": value, "x": X}, META)
    assert moved["value"] is value
    assert moved["x"].device == META


def test_pinning_leaves_what_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    pinned = pin({"x": Edge(X), "y": X.to_sparse(), "z": X.to(META), "text": "text"})
    assert type(pinned["x"]) is Edge
    assert torch.equal(pinned["x"].to, X + 1)
    assert pinned["y"].layout is torch.sparse_coo


def test_a_loader_pins_by_itself_what_its_collate_function_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    # As on a machine with a GPU.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    (batch,) = ShardedLoader([torch.ones(2)], 1, collate_fn=lambda rows: Edge(rows[0]), pin_memory=True)
    assert type(batch) is Edge
    assert batch.x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("value", "samples"),
    [
        (X, 3),
        ({"name": "a", "scalar": torch.tensor(5), "deep": [(torch.zeros(4, 1), X)]}, 4),
        (Frozen({"x": torch.zeros(0)}), 0),
        (MOVED["packed sequence"], 2),
        (Encoding(x=X), 3),
        ({"scalar": torch.tensor(5)}, None),
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_tensor_is_long(value: Any, samples: int | None) -> None:
    assert count_samples(value) == samples
