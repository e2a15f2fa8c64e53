"""The timeline of `trainer trace`, of strategies that stand in for real ones."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.ops import trace
from trainer.ops.trace import Timeline

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("observe", "_follow_pytorch", "_follow_horovod"):
        monkeypatch.setattr(trace, name, lambda *_: None)


def strategy_of_one(**methods: Any) -> Any:
    """Return what a timeline takes of a strategy of one rank."""
    alone = {
        "world": SimpleNamespace(rank=0, size=1, is_root=True),
        "all_gather_object": lambda value: [value],
        "broadcast_object": lambda value, root: value,
        "follow_loader": None,
        "start_gradients": lambda flat, name: lambda: (flat, name),
        "close": lambda: None,
    }
    return SimpleNamespace(**(alone | methods))


def events_of(file: Path, phase: str = "X") -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == phase]


def fail(*_: object, **__: object) -> None:
    raise FULL


def test_each_bucket_that_is_on_its_way_at_the_same_time_has_a_message(tmp_path: Path) -> None:
    file, strategy = tmp_path / "trace.json", strategy_of_one()
    Timeline(file).follow(strategy)
    waits = [strategy.start_gradients(torch.zeros(size), "bucket") for size in (2, 3)]
    assert [wait()[1] for wait in waits] == ["bucket", "bucket"]
    strategy.close()
    assert [event["args"]["bytes"] for event in events_of(file, "b")] == [8, 12]
    assert len(events_of(file, "e")) == 2


def test_runs_one_after_another_are_in_one_file_once_each(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    for size in (1, 2):
        strategy = strategy_of_one()
        assert timeline.follow(timeline.follow(strategy)) is strategy  # as where a run is given another's strategy
        strategy.start_gradients(torch.zeros(size), "bucket")()
        strategy.close()
    assert [event["args"]["bytes"] for event in events_of(tmp_path / "trace.json", "b")] == [4, 8]


def test_who_closes_its_run_because_it_fails_asks_no_other_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = strategy_of_one()
    Timeline(tmp_path / "trace.json").follow(strategy)
    strategy.broadcast_object = fail

    def train() -> None:
        try:
            raise ValueError("mine")
        finally:
            strategy.close()

    with pytest.raises(ValueError, match="mine"):
        train()
    assert [file.name for file in tmp_path.iterdir()] == ["trace.rank-0.json"]
    assert capsys.readouterr().err.count("\n") == 1


def test_ranks_that_can_exchange_nothing_any_more_have_timelines_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    timeline.follow(strategy_of_one(broadcast_object=fail))
    timeline.end(failed=False)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.rank-0.json"]
    assert "cannot exchange their timelines any more: " in capsys.readouterr().err


@pytest.mark.parametrize("failed", [False, True])
def test_a_full_disk_at_the_end_costs_the_timeline_alone(
    failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    timeline.follow(strategy_of_one())
    monkeypatch.setattr(trace, "write_atomically", fail)
    timeline.end(failed=failed)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("json cannot be written: No space left on device")


def test_a_script_that_joins_no_job_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Timeline(tmp_path / "trace.json").end(failed=False)
    assert "no timeline, because" in capsys.readouterr().err


def test_passes_in_an_optimizers_step_lie_within_it(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    timeline.follow(strategy_of_one())
    timeline.before_step()  # with a closure, as L-BFGS's
    timeline.backward(lambda: None)
    timeline.after_step()
    timeline.end(failed=False)
    bars = {event["name"]: event for event in events_of(tmp_path / "trace.json")}
    assert bars["step"]["ts"] <= bars["forward"]["ts"]
    assert bars["backward"]["ts"] + bars["backward"]["dur"] <= bars["step"]["ts"] + bars["step"]["dur"]


def test_a_clock_that_drifts_is_put_right_over_the_whole_run() -> None:
    hour = 3_600 * 10**9
    moments = [(5 * hour, 0), (6 * hour + 72_000_000, hour)]  # this rank's is faster by 72 ms an hour
    spans = [("loop", "data", 5 * hour + (hour + 72_000_000) // 2, 6 * hour + 72_000_000, 0)]
    (event,) = (event for event in trace._events(3, spans, moments) if event["ph"] == "X")
    assert (event["ts"], event["ts"] + event["dur"]) == (hour / 2e3, hour / 1e3)


def test_another_machines_clock_is_compared_at_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    lead = 1_000_000
    monkeypatch.setattr(trace, "machine_id", lambda: "b")
    monkeypatch.setattr(trace, "_now", iter(range(100)).__next__)

    def all_gather(value: Any) -> list[Any]:
        root = ("a", value[1] - lead) if isinstance(value, tuple) else [time - lead for time in value]
        return [root, value]

    strategy = strategy_of_one(all_gather_object=all_gather, barrier=lambda: None)
    here, at_root = trace._same_moment(strategy)
    assert here - at_root == lead
