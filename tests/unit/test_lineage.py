"""The lineage of a training that was interrupted: each epoch has to have each sample once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.lineage import Start, problems, read
from trainer.checkpoint.disk.committed import name_of

EPOCHS, SAMPLES, UPDATES = 2, 4, 4
"""Two updates an epoch, and one sample for each of the two ranks in an update."""


def start(attempt: int, resumed: str | None, *updates: int, time: float = 0.0) -> Start:
    lines = {
        update: [
            {"update": update, "epoch": (update - 1) // 2, "samples": [2 * ((update - 1) % 2) + rank], "time": time}
            for rank in range(2)
        ]
        for update in updates
    }
    return Start(attempt, resumed, time, lines)


def found(*starts: Start) -> list[str]:
    return problems(starts, EPOCHS, SAMPLES, UPDATES)


def test_updates_after_the_checkpoint_count_once() -> None:
    assert found(start(1, None, 1, 2, 3), start(2, name_of(1, 0, 2), 3, 4)) == []


def test_an_update_that_is_missing_is_found() -> None:
    assert found(start(1, None, 1), start(2, name_of(1, 0, 2), 3, 4)) == [
        "update 2 of attempt 1 was saved, and no rank has logged it"
    ]


def test_a_sample_that_is_trained_twice_is_found() -> None:
    whole = start(1, None, 1, 2, 3, 4)
    whole.updates[4][1]["samples"] = [2]
    assert found(whole) == ["epoch 1: samples [3] were never trained, [2] more than once"]


def test_ranks_that_went_on_from_different_checkpoints_are_found(tmp_path: Path) -> None:
    for rank, resumed in enumerate(("one", "another")):
        line = json.dumps({"attempt": 2, "resumed": resumed, "time": 0.0})
        (tmp_path / f"a-{rank}.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="went on from different checkpoints"):
        read(tmp_path)
