"""benchmarks/recipes.py: the time to an accuracy, from the record of a run's epochs."""

from __future__ import annotations

import json

from benchmarks.recipes import Outcome, read_outcome, render


def _epoch(seconds: float, accuracy: float) -> str:
    return json.dumps({"seconds": seconds, "validation": {"metrics": {"accuracy": accuracy}}})


def test_the_time_ends_with_the_first_epoch_that_has_the_accuracy() -> None:
    lines = [_epoch(4.0, 0.98), _epoch(3.0, 0.9900), _epoch(2.0, 0.985)]
    assert read_outcome("\n".join(lines)) == Outcome(seconds=7.0, total_s=9.0, percent=98.5)
    assert read_outcome(lines[0]).seconds is None


def test_a_recipe_has_a_row_with_the_seeds_that_reached_the_accuracy() -> None:
    slow = Outcome(seconds=None, total_s=9.0, percent=98.5)
    rows = render(
        {"default": [slow, Outcome(seconds=8.0, total_s=8.0, percent=99.1)], "channels-last, three epochs": [slow]}
    ).splitlines()
    assert rows[2] == "| default |  | 1 of 2 | 8.0 (8.0 – 8.0) | 8.5 (8.0 – 9.0) | 98.80 (98.50 – 99.10) |"
    assert rows[3].startswith("| channels-last, three epochs | `--channels-last --epochs 3` | 0 of 1 |  | 9.0 ")
