"""Names for torch.profiler: there while it runs, and without any cost of `record_function` elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.profiler import profile

from tests.unit.small_trainings import close_all, start, train
from trainer.watch import spans


def test_a_profiler_shows_each_batch_and_each_checkpoint(tmp_path: Path) -> None:
    with profile() as profiler:
        run, model, optimizer, checkpoints = start(tmp_path, every_epochs=1)
        train(run, model, optimizer)
        checkpoints.save()
        close_all()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts[spans.LOADER] == 2 * (3 + 1)  # the last time, there is no batch left
    assert counts[spans.CHECKPOINT] >= 2


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.autograd.profiler.record_function")
    assert list(spans.in_span(spans.WAIT, spans.loading, [1, 2])) == [1, 2]
