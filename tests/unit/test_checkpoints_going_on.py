"""How a run goes on from a checkpoint, whatever its loop looks like; in a world of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.small_trainings import close_all, made, start, step, train
from tests.unit.test_loader import numbered
from trainer import TrainerError, init
from trainer.checkpoint.disk.committed import find


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all()


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


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_scheduler_that_would_begin_anew_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_kept: bool
) -> None:
    run, model = init("single"), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = run.prepare(model, optimizer)
    made.append(run.checkpoints(tmp_path, state={"schedule": schedule} if is_kept else {"totals": {}}))
    train(run, model, optimizer)
    assert ("has a scheduler that is not in the state of run.checkpoints" in capsys.readouterr().err) is not is_kept


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


def test_what_has_changed_at_the_same_update_is_saved_where_it_is_asked_for(tmp_path: Path) -> None:
    state = {"score": 0}
    run, model, optimizer, checkpoints = start(tmp_path, state={"facts": state})
    train(run, model, optimizer, epochs=1)
    state["score"] = 7
    checkpoints.save()
    newest, _ = find(tmp_path)
    assert checkpoints.newest_path == newest
    checkpoints.close()
    again = {"score": 0}
    start(tmp_path, state={"facts": again})
    assert again["score"] == 7


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


def test_a_record_goes_on(tmp_path: Path) -> None:
    for starts in range(2):
        run, _, _, checkpoints = start(tmp_path / "checkpoints")
        folder = run.record(tmp_path / "record")
        run.log({"loss": 0.5}, step=starts)
        checkpoints.close()
    assert [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()] == [0, 1]
    with pytest.raises(TrainerError, match="already holds a run"):
        init("single").record(tmp_path / "record")
