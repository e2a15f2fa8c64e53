"""A checkpoint of someone else's is read as data: what would run code is refused, whichever of its files has it."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.small_trainings import close_all, start, train
from trainer import CheckpointConfig, ConfigError, Trainer, TrainerConfig, TrainerError
from trainer.checkpoint.disk.commit import commit
from trainer.checkpoint.disk.committed import MANIFEST, find, load, name_of
from trainer.checkpoint.disk.state_files import STATE, part_name
from trainer.ops.merge import merge


class Touches:
    """What makes a file when a pickle of it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.file),)


def pickled(marker: Path) -> bytes:
    return pickle.dumps(Touches(marker))


def saved(marker: Path) -> bytes:
    """PyTorch's format, a ZIP archive with a pickle."""
    file = io.BytesIO()
    torch.save({"models": Touches(marker)}, file)
    return file.getvalue()


def saved_as_before_1_6(marker: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"models": Touches(marker)}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def saved_as_before_0_2(marker: Path) -> bytes:
    """A TAR archive, whose pickles PyTorch loaded in spite of `weights_only=True` until 2.6 (CVE-2025-32434)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(pickled(marker))
            archive.addfile(entry, io.BytesIO(pickled(marker)))
    return file.getvalue()


def with_pickle(content: bytes, *more: str) -> bytes:
    """PyTorch's format with this pickle in it, and with more files."""
    file = io.BytesIO()
    torch.save({}, file)
    changed = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(changed, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, content if name.endswith("data.pkl") else archive.read(name))
        for name in more:
            copy.writestr(f"archive/{name}", b"")
    return changed.getvalue()


def as_torch_script(marker: Path) -> bytes:
    """What PyTorch takes for a program in TorchScript: `constants.pkl` tells it."""
    return with_pickle(pickled(marker), "constants.pkl")


def set_item_of_no_dict(marker: Path) -> bytes:
    """An item that is set of something other than a dict, which PyTorch took until 2.9 (CVE-2026-24747)."""
    return with_pickle(b"\x80\x02]K\x00aK\x00K\x01s.")


def with_more_values_than_bytes(marker: Path) -> bytes:
    """A tensor that reaches behind the memory of its values, which PyTorch took until 2.9 as well."""
    file = io.BytesIO()
    torch.save({"models": torch.zeros(4)}, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        content = archive.read(name)
    assert content.count(b"K\x04") == 2  # the number of values, and the shape
    return with_pickle(content.replace(b"K\x04", b"Mi\x7f"), "data/0")


CRAFTED = [pickled, saved, saved_as_before_1_6, saved_as_before_0_2]
CRAFTED += [as_torch_script, set_item_of_no_dict, with_more_values_than_bytes]
Crafted = Callable[[Path], bytes]


def resume_loop(folder: Path) -> None:
    run, model, optimizer, _ = start(folder)
    train(run, model, optimizer)


def resume_fit(folder: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.zeros(6, 1))
    trainer = Trainer(
        model,
        optimizer,
        nn.functional.mse_loss,
        strategy="single",
        config=TrainerConfig(device="cpu", batch_size=2),
        output=None,
        progress=False,
        checkpoint=CheckpointConfig(folder=folder),
    )
    try:
        trainer.fit(data, epochs=2)
    finally:
        if trainer.run._checkpoints is not None:
            trainer.run._checkpoints.close()


def make_one_file(folder: Path) -> None:
    merge(folder, folder / "whole.pt")


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that a training has written, and that nobody has changed."""
    folder = tmp_path_factory.mktemp("genuine")
    run, model, optimizer, checkpoints = start(folder)
    train(run, model, optimizer, epochs=1)
    checkpoints.save()
    close_all()
    return find(folder)[0]


def write_crafted(folder: Path, genuine: Path, file: str, content: bytes) -> None:
    """Write a checkpoint with the genuine one's facts, whose manifest says that everything is as it was written."""
    contents = {STATE: (genuine / STATE).read_bytes(), file: content}
    files = {name: partial(write, data) for name, data in contents.items()}
    commit(folder, name_of(1, 1, 3), files, load(genuine).facts)


def write(data: bytes, file: Any) -> None:
    file.write(data)


@pytest.mark.parametrize(
    ("file", "read"), [(STATE, resume_loop), (STATE, resume_fit), (part_name(0), resume_loop), (STATE, make_one_file)]
)
@pytest.mark.parametrize("craft", CRAFTED)
def test_a_crafted_file_is_refused_and_runs_nothing(
    craft: Crafted, file: str, read: Callable[[Path], None], genuine: Path, tmp_path: Path
) -> None:
    write_crafted(tmp_path, genuine, file, craft(tmp_path / "marker"))
    try:
        with pytest.raises(TrainerError, match="cannot be loaded as data"):
            read(tmp_path)
    finally:
        close_all()
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("read", [resume_loop, resume_fit, make_one_file])
def test_a_pickle_in_the_manifests_place_is_no_manifest(
    read: Callable[[Path], None], genuine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_crafted(tmp_path, genuine, part_name(0), b"")
    (find(tmp_path)[0] / MANIFEST).write_bytes(pickled(tmp_path / "marker"))
    error = ""
    try:
        read(tmp_path)
    except ConfigError as refused:  # where there is no other checkpoint to read
        error = str(refused)
    finally:
        close_all()
    assert "manifest.json is damaged" in error + capfd.readouterr().err
    assert not (tmp_path / "marker").exists()


WRONG_FACTS: dict[str, list[Any]] = {
    "written": [1, "\x1b[2J"],
    "best": ["x", {}, [1.0], ["1.0", name_of(1, 1, 3)], [1.0, "../elsewhere"], [1.0, 1]],
}


@pytest.mark.parametrize("read", [resume_loop, resume_fit])
@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_facts_that_no_run_has_written_are_one_line(
    fact: str, read: Callable[[Path], None], genuine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    facts, state = load(genuine).facts, (genuine / STATE).read_bytes()
    wrong = [{**facts, fact: value} for value in WRONG_FACTS[fact]]
    wrong.append({name: value for name, value in facts.items() if name != fact})
    for number, changed in enumerate(wrong, 1):
        commit(tmp_path, name_of(number, 1, 3), {STATE: partial(write, state)}, changed)
    try:
        read(tmp_path)
    finally:
        close_all()
    warnings = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warnings) == len(wrong)
    assert all("-update-00000003: manifest.json has no valid written and best" in line for line in warnings)


@pytest.mark.parametrize("craft", [pickled, saved, saved_as_before_1_6])
def test_the_crafted_files_run_code_where_they_are_not_read_as_data(craft: Crafted, tmp_path: Path) -> None:
    file = io.BytesIO(craft(tmp_path / "marker"))
    if craft is pickled:
        pickle.load(file)  # noqa: S301
    else:
        torch.load(file, weights_only=False)
    assert (tmp_path / "marker").exists()
