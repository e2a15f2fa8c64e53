"""When a run is saved, and what is told where it cannot be; in a world of one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.test_loader import numbered
from trainer import Checkpoints, ConfigError, Run, TrainerError, init
from trainer.checkpoint.committed import find, load

made: list[Checkpoints] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def start(folder: Path, **options: Any) -> tuple[Run, nn.Module, torch.optim.Optimizer, Checkpoints]:
    """A model with momentum, so that its state tells how often it has stepped."""
    run, model = init("single"), nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    made.append(run.checkpoints(folder, **options))
    return run, model, optimizer, made[-1]


def step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    run.backward(model(inputs).mean())
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Return epoch, updates and the loaders' positions of each checkpoint, oldest first."""
    for one in made:
        one._saver.wait()
    facts = [load(path).facts for path in reversed(find(folder))]
    return [(one["epoch"], one["updates"], one["taken"]) for one in facts]


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int = 2, samples: int = 6) -> None:
    loader = run.loader(numbered(samples), 2)
    for _ in run.epochs(epochs):
        for inputs, _ in loader:
            step(run, model, optimizer, inputs)


def test_every_so_many_updates_and_at_the_end(tmp_path: Path) -> None:
    run, model, optimizer, checkpoints = start(tmp_path, every_updates=2, keep=9)
    train(run, model, optimizer)
    assert saved(tmp_path) == [(0, 2, [4]), (1, 4, [2]), (1, 6, [6]), (2, 6, [0])]
    assert len(checkpoints.stalls_s) == 4


def test_every_so_many_epochs(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path, every_epochs=2, keep=9)
    train(run, model, optimizer, epochs=5)
    assert saved(tmp_path) == [(2, 6, [0]), (4, 12, [0]), (5, 15, [0])]


def test_every_so_many_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    run, model, optimizer, checkpoints = start(tmp_path, every_s=10, keep=9)
    loader = run.loader(numbered(20), 2)
    for _ in run.epochs(1):
        for inputs, _ in loader:
            now += 4
            step(run, model, optimizer, inputs)
            checkpoints._saver.wait()  # one that is being written postpones the next
    assert [updates for _, updates, _ in saved(tmp_path)] == [3, 6, 9, 10]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path, every_updates=1, keep=2)
    train(run, model, optimizer)
    assert saved(tmp_path) == [(1, 6, [6]), (2, 6, [0])]


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


def test_within_a_loop_in_a_loop_the_outer_one_says_where_it_is_saved(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path, every_updates=1, keep=9)
    outer, inner = run.loader(numbered(4), 2), run.loader(numbered(6), 2)
    for _ in run.epochs(1):
        for inputs, _ in outer:
            for others, _ in inner:
                step(run, model, optimizer, torch.cat([inputs, others]))
    assert [taken for _, _, taken in saved(tmp_path)] == [[2, 0], [4, 0], [0, 0]]


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


def test_plain_data_and_objects_go_on(tmp_path: Path) -> None:
    for expected in (0, 1):
        totals = {"starts": 0}
        average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))
        run, model, optimizer, checkpoints = start(tmp_path, state={"totals": totals, "average": average})
        assert (totals["starts"], int(average.n_averaged)) == (expected, expected)
        totals["starts"] += 1
        average.update_parameters(model)
        train(run, model, optimizer, epochs=1 + expected)
        checkpoints.close()


def test_what_has_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state 'best' is a float; valid are a dict, and objects with state_dict"):
        start(tmp_path, state={"best": 0.5})


def test_a_setting_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.checkpoints has no setting 'every'; valid are folder, every_s"):
        start(tmp_path, every="30s")
    with pytest.raises(ConfigError, match="every_s and every_updates are given; checkpoints take one interval"):
        start(tmp_path, every_s=1, every_updates=1)
    with pytest.raises(ConfigError, match="keep is 0; it must be at least 1; on_error is 'ignore'; valid are continue"):
        start(tmp_path, keep=0, on_error="ignore")


def full(folder: Path, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_a_disk_that_is_too_small_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(tmp_path, 3_000_000, monkeypatch)
    with pytest.raises(ConfigError, match=r"4 checkpoints of 1\.05 MB do not fit into .*: 1\.19 MB are missing"):
        start(tmp_path)
    start(tmp_path, keep=1)


def test_a_disk_that_fills_up_leaves_the_training_and_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, model, optimizer, checkpoints = start(tmp_path, every_updates=1, keep=9)
    loader = run.loader(numbered(6), 2)
    for _ in run.epochs(2):
        for inputs, _ in loader:
            step(run, model, optimizer, inputs)
            if checkpoints.updates == 3:
                full(tmp_path, 1000, monkeypatch)
    assert [updates for _, updates, _ in saved(tmp_path)] == [1, 2, 3]
    said = capfd.readouterr().err
    assert said.count("does not fit into") == 1
    assert "MB are missing; earlier checkpoints are kept, and the training goes on" in said


def test_a_disk_that_fills_up_ends_the_training_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, optimizer, _ = start(tmp_path, every_updates=1, on_error="stop")
    full(tmp_path, 1000, monkeypatch)
    with pytest.raises(TrainerError, match="are missing; earlier checkpoints are kept"):
        train(run, model, optimizer)


def test_two_loaders_at_once_go_on_where_both_stopped(tmp_path: Path) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    class Interrupted(Exception):  # noqa: N818 (it is no error)
        pass

    def go_over(stop_after: int) -> None:
        run, model, optimizer, checkpoints = start(tmp_path, every_updates=1)
        loaders = [run.loader(numbered(6), 2, shuffle=False), run.loader(numbered(9), 3, shuffle=False)]
        del seen[checkpoints.updates :]  # what is trained again
        for _ in run.epochs(2):
            for (inputs, places), (_, others) in zip(*loaders, strict=False):
                seen.append((places.tolist(), others.tolist()))
                step(run, model, optimizer, inputs)
                if len(seen) == stop_after:
                    raise Interrupted

    for stop_after in (2, 3, 4):
        with pytest.raises(Interrupted):
            go_over(stop_after)
        made.pop().close()
    go_over(-1)
    assert seen == [([0, 1], [0, 1, 2]), ([2, 3], [3, 4, 5]), ([4, 5], [6, 7, 8])] * 2


def test_plain_pytorch_reads_the_models(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path)
    train(run, model, optimizer)
    made[-1]._saver.wait()
    state = torch.load(find(tmp_path)[0] / "state.pt", weights_only=True)
    plain = nn.Linear(2, 1)
    plain.load_state_dict(state["models"][0])
    assert torch.equal(plain.weight, run.unwrap(model).weight)  # type: ignore[arg-type]


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


def test_a_loader_that_is_made_in_each_epoch_goes_on(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def go_over(stop_after: int) -> None:
        run, model, optimizer, checkpoints = start(tmp_path, every_updates=1)
        del seen[checkpoints.updates :]  # what is trained again
        for epoch in run.epochs(3):
            loader = run.loader(numbered(6), 2)
            loader.epoch = epoch
            for inputs, places in loader:
                seen.append(places.tolist())
                step(run, model, optimizer, inputs)
                if len(seen) == stop_after:
                    raise KeyError

    for stop_after in (2, 5, 6, 8):
        with pytest.raises(KeyError):
            go_over(stop_after)
        made.pop().close()
    go_over(-1)
    epochs = [[place for batch in seen[start : start + 3] for place in batch] for start in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3
    assert len(seen) == 9


def test_two_loops_in_an_epoch_go_on_in_the_second(tmp_path: Path) -> None:
    seen: list[str] = []

    def go_over(stop_after: int) -> None:
        run, model, optimizer, checkpoints = start(tmp_path, every_updates=1)
        loaders = {"a": run.loader(numbered(4), 2), "b": run.loader(numbered(6), 2)}
        next(iter(loaders["a"]))  # a look before the loop takes nothing away
        del seen[checkpoints.updates :]  # what is trained again
        for epoch in run.epochs(2):
            for name in "aba":
                for inputs, _ in loaders[name]:
                    seen.append(f"{name}{epoch}")
                    step(run, model, optimizer, inputs)
                    if len(seen) == stop_after:
                        raise KeyError

    expected = ["a0"] * 2 + ["b0"] * 3 + ["a0"] * 2 + ["a1"] * 2 + ["b1"] * 3 + ["a1"] * 2
    for stop_after in (3, 5, 6, 9, 13):
        with pytest.raises(KeyError):
            go_over(stop_after)
        made.pop().close()
    go_over(-1)
    assert seen == expected


def test_a_save_after_the_loop_does_not_bring_the_epoch_back(tmp_path: Path) -> None:
    steps = 0
    for expected in (3, 6):
        run, model, optimizer, checkpoints = start(tmp_path, every_updates=100)
        loader = run.loader(numbered(6), 2)
        for _ in run.epochs(2):
            for inputs, _ in loader:
                step(run, model, optimizer, inputs)
                steps += 1
            checkpoints.save()
            if steps == expected:
                break
        made.pop().close()
        assert steps == expected


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
    start(tmp_path, state={"layer": nn.Linear(2, 1)})[3].finish()
    made.pop().close()
    with pytest.raises(ConfigError, match="state 'layer' of the checkpoint does not fit this Linear"):
        start(tmp_path, state={"layer": nn.Linear(3, 1)})


def test_a_score_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    run, model, optimizer, checkpoints = start(tmp_path, every_epochs=1, best="min", keep=1)
    loader = run.loader(numbered(6), 2)
    for epoch in run.epochs(3):
        for inputs, _ in loader:
            step(run, model, optimizer, inputs)
        checkpoints.rate([float("nan"), 0.1, 0.2][epoch])
    assert [epoch for epoch, _, _ in saved(tmp_path)] == [2, 3]


def test_a_named_checkpoint_is_where_the_first_start_begins(tmp_path: Path) -> None:
    run, model, optimizer, _ = start(tmp_path, every_epochs=1, keep=9)
    train(run, model, optimizer, epochs=3)
    made.pop().close()
    first = find(tmp_path)[-1]
    for updates in (3, 6):
        run, model, optimizer, checkpoints = start(tmp_path, every_epochs=1, keep=1, resume=first)
        assert checkpoints.updates == updates
        loader = run.loader(numbered(6), 2)
        for _ in run.epochs(3):
            for inputs, _ in loader:
                step(run, model, optimizer, inputs)
            checkpoints.save()
            break
        made.pop().close()
        assert first in find(tmp_path)
