"""The count of updates to an accuracy: its table, its settings, and what it does with a training that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import updates_to
from benchmarks.updates_to import Outcome, render
from trainer.errors import TrainerError
from trainer.ops.processes import Finished


def test_the_table_has_medians_ranges_and_what_was_missed() -> None:
    some = [Outcome(updates=320, percent=98.0), Outcome(updates=None, percent=97.5), Outcome(updates=304, percent=98.2)]
    lines = render({"sync_every=8": some, "compression=none": [Outcome(updates=None, percent=90.0)]}, 98.0).splitlines()
    assert lines[0] == "| setting | updates to 98 % | accuracy at the end, % | missed |"
    assert lines[2:] == [
        "| sync_every=8 | 312 (304–320) | 97.90 (97.50–98.20) | 1 |",
        "| compression=none |  | 90.00 (90.00–90.00) | 1 |",
    ]


def test_a_training_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = Finished(code=1, stdout="", stderr="no such setting\n", seconds=1.0)
    monkeypatch.setattr(updates_to, "run", lambda *_, **__: ended)
    options = updates_to._parse_args(["--data-dir", str(tmp_path)])
    with pytest.raises(TrainerError, match=r"nope=1, seed 3: .*no such setting"):
        updates_to._launch("nope=1", 3, options)
