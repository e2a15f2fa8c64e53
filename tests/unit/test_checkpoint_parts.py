"""Checkpoints that several ranks write into one folder: threads here, which know nothing of one another."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoints import NAME, names
from trainer.checkpoint.disk.commit import OthersFailedError, begin, commit, contribute
from trainer.checkpoint.disk.committed import find, load, name_of
from trainer.checkpoint.disk.state_files import STATE, part_name, read_state
from trainer.cli import main
from trainer.errors import ConfigError, TrainerError
from trainer.models.sharded import Part, Scattered, shard_as
from trainer.ops.merge import merge

PARTS = [part_name(rank) for rank in (0, 1)]


def writing(content: bytes, after: Callable[[], object] = lambda: None) -> Callable[[BinaryIO], object]:
    def write(file: BinaryIO) -> None:
        after()
        file.write(content)

    return write


def fail(code: int) -> None:
    raise OSError(code, os.strerror(code))


def test_the_checkpoint_has_all_ranks_files_whoever_is_first(tmp_path: Path) -> None:
    for number, (first_s, second_s) in enumerate([(0.0, 0.1), (0.1, 0.0)]):
        name = name_of(1, 0, number)
        begin(tmp_path, name)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(contribute, tmp_path, name, "b", writing(b"22", partial(time.sleep, second_s)))
            files = {"a": writing(b"1", partial(time.sleep, first_s))}
            committed = commit(tmp_path, name, files, {}, others=["b"])
            other.result()
        assert {file: entry.size for file, entry in load(committed.path).files.items()} == {"a": 1, "b": 2}
        assert names(committed.path) == ["a", "b", "manifest.json"]


def test_a_rank_that_fails_stops_all_and_leaves_nothing(tmp_path: Path) -> None:
    """Also one that has nothing to write yet, and one whose write is under way."""
    begin(tmp_path, NAME)
    has_failed = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(contribute, tmp_path, NAME, "b", writing(b"2", partial(has_failed.wait, 10)))
        first = pool.submit(commit, tmp_path, NAME, {"a": writing(b"1")}, {}, others=["b", "c"])
        with pytest.raises(TrainerError, match=r"c\.partial: No space left on device"):
            contribute(tmp_path, NAME, "c", writing(b"3", partial(fail, errno.ENOSPC)))
        has_failed.set()
        for other in (slow, first):
            with pytest.raises(OthersFailedError, match="another rank could not write its part"):
                other.result()
        with pytest.raises(OthersFailedError):
            contribute(tmp_path, NAME, "d", writing(b"4"))
    assert names(tmp_path) == []


def test_a_rank_that_does_not_come_is_named_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.disk.commit.TIMEOUT_S", 0.1)
    begin(tmp_path, NAME)
    contribute(tmp_path, NAME, "b", writing(b"2"))
    with pytest.raises(OthersFailedError, match=r"have not written c, d within 0\.1 s"):
        commit(tmp_path, NAME, {"a": writing(b"1")}, {}, others=["b", "c", "d"])
    assert find(tmp_path) == []


def scattered() -> Scattered:
    """Rows of a 4 x 3 matrix: 3 in one part, 1 in another."""
    whole = torch.arange(12.0).view(4, 3)
    return Scattered(whole.shape, whole.dtype, [Part((3, 0), whole[3:]), Part((0, 0), whole[:3])])


@pytest.mark.parametrize(("offset", "shape"), [((0, 0), (4, 3)), ((2, 1), (2, 2)), ((3, 0), (1, 3)), ((4, 0), (0, 3))])
def test_a_box_is_read_from_all_parts_that_it_touches(offset: tuple[int, int], shape: tuple[int, int]) -> None:
    box = torch.arange(12.0).view(4, 3)[offset[0] :, offset[1] :][: shape[0], : shape[1]]
    assert torch.equal(scattered().read(offset, shape), box)


def save_parts(folder: Path, *parts: dict[Any, Any]) -> Path:
    state = {"models": [{"weight": torch.empty(4, 3, device="meta"), "mean": torch.ones(2)}]}
    files = {STATE: state, **dict(zip(PARTS, parts, strict=False))}
    return commit(folder, NAME, {name: partial(torch.save, content) for name, content in files.items()}, {}).path


def rows(begin: int, end: int) -> dict[Any, Any]:
    values = torch.arange(12.0).view(4, 3)[begin:end].clone()
    return {("models", 0, "weight"): {"offset": (begin, 0), "values": values}}


def test_a_state_in_parts_is_read_from_all_of_them(tmp_path: Path) -> None:
    (model,) = shard_as(read_state(save_parts(tmp_path, rows(0, 3), rows(3, 4))), None)["models"]
    assert torch.equal(model["weight"], torch.arange(12.0).view(4, 3))
    assert torch.equal(model["mean"], torch.ones(2))


def test_a_part_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"as data \(9 of the 12 values of models\.0\.weight are in its files"):
        read_state(save_parts(tmp_path, rows(0, 3)))


def test_a_merged_checkpoint_is_one_file_for_plain_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parts(tmp_path / "checkpoints", rows(0, 3), rows(3, 4))
    assert main(["merge", str(tmp_path / "checkpoints"), str(tmp_path / "whole.pt")]) == 0
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(state["models"][0]["weight"], torch.arange(12.0).view(4, 3))
    assert f"of 2 parts of {NAME}" in capsys.readouterr().out
    assert names(tmp_path) == ["checkpoints", "whole.pt"]


def test_the_weights_of_a_checkpoint_are_a_file_for_other_libraries(tmp_path: Path) -> None:
    save_parts(tmp_path / "checkpoints", rows(0, 3), rows(3, 4))
    merge(tmp_path / "checkpoints", tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["weight"], torch.arange(12.0).view(4, 3))
    assert set(state) == {"weight", "mean"}


@pytest.mark.parametrize(
    ("checkpoint", "file", "problem"),
    [
        ("checkpoints", "there.pt", "there.pt is there already"),
        ("nothing", "new.pt", "nothing is no checkpoint, and there is none in it"),
        ("checkpoints/" + NAME, "new.pt", "part-00001.pt has 1 bytes instead of"),
        ("checkpoints", "new.pt", "part-00001.pt has 1 bytes instead of"),
    ],
)
def test_what_cannot_be_merged_is_told_in_a_line(tmp_path: Path, checkpoint: str, file: str, problem: str) -> None:
    path = save_parts(tmp_path / "checkpoints", rows(0, 3), rows(3, 4))
    (tmp_path / "there.pt").write_bytes(b"mine")
    (path / PARTS[1]).write_bytes(b"x")
    with pytest.raises(ConfigError, match=problem):
        merge(tmp_path / checkpoint, tmp_path / file)
    assert names(tmp_path) == ["checkpoints", "there.pt"]
    assert (tmp_path / "there.pt").read_bytes() == b"mine"
