"""When a run is saved, and what is told where it cannot be; in a world of one."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.small_trainings import close_all, made, saved, start, step, train
from tests.unit.test_loader import numbered
from trainer import Checkpoints, ConfigError, TrainerError, init
from trainer.checkpoint.disk.committed import load


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all()


def test_every_so_many_updates_and_at_the_end(tmp_path: Path) -> None:
    run, model, optimizer, checkpoints = start(tmp_path, every_updates=2, keep=9)
    train(run, model, optimizer)
    assert saved(tmp_path) == [(0, 2, [4]), (1, 4, [2]), (1, 6, [6]), (2, 6, [0])]
    assert len(checkpoints.stalls_s) == 4


def test_every_so_many_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    run, model, optimizer, checkpoints = start(tmp_path, every_s=10, keep=9)
    loader = run.loader(numbered(20), 2)
    for _ in run.epochs(1):
        for inputs, _ in loader:
            now += 4
            step(run, model, optimizer, inputs)
            checkpoints._storage.wait()  # one that is being written postpones the next
    assert [updates for _, updates, _ in saved(tmp_path)] == [3, 6, 9, 10]


def test_with_two_loaders_at_once_no_batch_is_lost(tmp_path: Path) -> None:
    for order in (1, -1):
        folder = tmp_path / str(order)
        run, model, optimizer, _ = start(folder, every_updates=1, keep=9)
        loaders = [run.loader(numbered(6), 2), run.loader(numbered(3), 1)]
        for _ in run.epochs(1):
            for (inputs, _), (others, _) in zip(*loaders[::order], strict=True):
                step(run, model, optimizer, torch.cat([inputs, others]))
        # Saved where neither has a batch in use.
        assert [taken for _, _, taken in saved(folder)] == [[2, 1], [4, 2], [6, 3], [0, 0]]
        made.pop().close()


def test_gradients_that_wait_for_their_step_are_not_lost(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path, every_updates=1, keep=9)
    loader = run.loader(numbered(8), 2)
    for _ in run.epochs(1):
        for number, (inputs, _) in enumerate(loader, 1):
            run.backward(model(inputs).mean())
            if number % 2 == 0:  # accumulated by hand
                optimizer.step()
                optimizer.zero_grad()
    assert [taken for _, _, taken in saved(tmp_path)] == [[4], [8], [0]]


def test_save_within_a_loop_comes_after_the_update(tmp_path: Path) -> None:
    run, model, optimizer, checkpoints = start(tmp_path, every_updates=100)
    loader = run.loader(numbered(6), 2)
    for _ in run.epochs(1):
        for number, (inputs, _) in enumerate(loader):
            if number == 1:
                checkpoints.save()
            step(run, model, optimizer, inputs)
        assert saved(tmp_path) == [(0, 2, [4])]
        checkpoints.save()
        assert saved(tmp_path) == [(0, 2, [4]), (0, 3, [0])]


def test_two_loops_over_epochs_are_refused(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path)
    train(run, model, optimizer)
    with pytest.raises(ConfigError, match="this is the second"):
        list(run.epochs(2))


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trainer.checkpoint.disk.durable.os.write", refuse)


def test_a_disk_that_fills_up_leaves_the_training_and_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, model, optimizer, checkpoints = start(tmp_path, every_updates=1, keep=9)
    loader = run.loader(numbered(6), 2)
    for _ in run.epochs(2):
        for inputs, _ in loader:
            step(run, model, optimizer, inputs)
            if checkpoints.updates == 3:
                checkpoints._storage.wait()
                full(monkeypatch)
    assert [updates for _, updates, _ in saved(tmp_path)] == [1, 2, 3]
    monkeypatch.undo()
    said = capfd.readouterr().err
    assert said.count("cannot be written") == 1
    assert "No space left on device; earlier checkpoints are kept, and the training goes on" in said


def test_a_disk_that_fills_up_ends_the_training_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, optimizer, _ = start(tmp_path, every_updates=1, on_error="stop")
    full(monkeypatch)
    with pytest.raises(TrainerError, match="No space left on device; earlier checkpoints are kept"):
        train(run, model, optimizer)


def test_a_signal_waits_for_the_step_of_gradients_that_are_accumulated_by_hand(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path, every_updates=100)

    def accumulate() -> None:
        loader = run.loader(numbered(40), 2)
        for _ in run.epochs(1):
            for number, (inputs, _) in enumerate(loader, 1):
                run.backward(model(inputs).mean())
                if number == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                if number % 10 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                time.sleep(0.1)

    with pytest.raises(SystemExit):
        accumulate()
    assert [taken for _, _, taken in saved(tmp_path)] == [[20]]


def test_a_signal_on_a_full_disk_ends_the_training_as_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, optimizer, checkpoints = start(tmp_path, every_updates=100)
    full(monkeypatch)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(TrainerError, match="No space left on device; SIGTERM ends the job without its latest updates"):
        train(run, model, optimizer)
    assert not checkpoints._is_saved()


def test_epochs_that_are_not_counted_are_refused(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path)
    loader = run.loader(numbered(6), 2)
    passing = iter(loader)
    step(run, model, optimizer, next(passing)[0])
    with pytest.raises(TrainerError, match=r"needs the epochs to be counted: for epoch in run\.epochs"):
        next(passing)


def test_what_is_to_be_kept_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing was prepared yet; call run\.prepare before run\.checkpoints"):
        init("single").checkpoints(tmp_path)
    with pytest.raises(TrainerError, match=r"objects\.paths\.data of the checkpoint's state is a PosixPath"):
        start(tmp_path, state={"paths": {"data": Path("x")}})
    *held, checkpoints = start(tmp_path, state={"layer": nn.Linear(2, 1)})
    checkpoints.save()
    made.pop().close()
    del held
    with pytest.raises(ConfigError, match=r"state 'layer' of the checkpoint does not fit this Linear: .*size mismatch"):
        start(tmp_path, state={"layer": nn.Linear(3, 1)})


def test_the_best_and_the_newest_are_those_that_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def places(checkpoints: Checkpoints) -> list[int]:
        checkpoints._storage.wait()
        paths = (checkpoints.newest_path, checkpoints.best_path)
        return [load(path).facts["updates"] if path is not None else 0 for path in paths]

    committed = []
    for scores in ([0.5, 0.2, 0.9], [0.1, 0.0]):
        run, model, optimizer, checkpoints = start(tmp_path, every_epochs=1, best="min", keep=1)
        loader = run.loader(numbered(6), 2)
        committed.append(places(checkpoints))
        for _ in run.epochs(3 if checkpoints.resumed is None else 5):
            for inputs, _ in loader:
                step(run, model, optimizer, inputs)
            if len(committed) == 6:  # the last one would be the best, and is not written
                full(monkeypatch)
            checkpoints.rate(scores.pop(0))
            with suppress(TrainerError):
                checkpoints.save()
            committed.append(places(checkpoints))
        made.pop().close()
    assert committed == [[0, 0], [3, 3], [6, 6], [9, 6], [9, 6], [12, 12], [12, 12]]


def test_an_old_one_that_cannot_be_removed_takes_nothing_from_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise TrainerError("old checkpoints cannot be removed: Directory not empty")

    monkeypatch.setattr("trainer.checkpoint.run.storage.prune", refuse)
    run, model, optimizer, _ = start(tmp_path, every_updates=1, keep=1, on_error="stop")
    train(run, model, optimizer, epochs=1)
    assert len(saved(tmp_path)) == 4
    assert "cannot be removed: Directory not empty; the new one is saved" in capfd.readouterr().err


def test_an_error_that_is_not_ours_is_told_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_held, checkpoints = start(tmp_path)

    def fail(*_: object) -> None:
        raise TypeError

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(TrainerError, match="the checkpoint cannot be written: TypeError"):
        checkpoints.save()
    monkeypatch.undo()
    checkpoints.save()
    assert saved(tmp_path) == [(0, 0, [])]
