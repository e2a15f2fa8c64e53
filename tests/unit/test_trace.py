"""The timeline of `trainer trace`, of a strategy that stands in for a real one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.ops import trace


def test_each_bucket_that_is_on_its_way_at_the_same_time_has_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("observe", "_follow_pytorch"):  # which change the whole process
        monkeypatch.setattr(trace, name, lambda *_: None)
    strategy: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, is_root=True),
        all_gather_object=lambda value: [value],
        follow_loader=None,
        start_gradients=lambda flat, name: lambda: (flat, name),
        close=lambda: None,
    )
    file = tmp_path / "trace.json"
    trace.Timeline(file).follow(strategy)
    waits = [strategy.start_gradients(torch.zeros(size), "bucket") for size in (2, 3)]
    assert [wait()[1] for wait in waits] == ["bucket", "bucket"]
    strategy.close()
    events = json.loads(file.read_text())["traceEvents"]
    assert [event["args"]["bytes"] for event in events if event["ph"] == "b"] == [8, 12]
    assert len([event for event in events if event["ph"] == "e"]) == 2
