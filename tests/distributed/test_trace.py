"""`trainer trace`: the timeline of a script's ranks under each launcher, and of one that fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.distributed.harness import run_job
from trainer.cluster import exit_codes

JOB = str(Path(__file__).with_name("job_that_is_timed.py"))
SLOW_S, INPUT_S = 0.005, 0.001
UPDATES = 200


def traced(file: Path, rank: int, name: str, phase: str = "X") -> list[dict[str, Any]]:
    """Return the events of a rank with a name, by the time at which they begin."""
    events = json.loads(file.read_text())["traceEvents"]
    found = [event for event in events if (event["pid"], event["name"], event["ph"]) == (rank, name, phase)]
    return sorted(found, key=lambda event: float(event.get("ts", 0.0)))


Traces = Callable[[str], Path]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Traces a job of two ranks under a launcher, once."""

    @cache
    def trace(launcher: str) -> Path:
        file = tmp_path_factory.mktemp("traces") / "trace.json"
        job = [JOB, "auto", str(SLOW_S), str(INPUT_S)]
        outcome = run_job(launcher, 2, ["-m", "trainer", "trace", str(file), *job])
        assert outcome.code == 0, outcome.output
        assert outcome.output.count(f"trainer trace: wrote {file}") == 1
        return file

    return trace


@pytest.mark.parametrize("launcher", ["mpi", pytest.param("gloo", marks=pytest.mark.slow), "torchrun"])
def test_it_shows_which_rank_is_waited_for(launcher: str, traces: Traces) -> None:
    file = traces(launcher)
    for rank in (0, 1):
        for name in ("forward", "backward", "gradients", "step"):
            assert len(traced(file, rank, name)) == UPDATES, (rank, name)
        assert median(event["dur"] for event in traced(file, rank, "data")) >= INPUT_S * 1e6
        messages = traced(file, rank, "gradients", "b")
        assert len(messages) == UPDATES
        assert all(message["args"]["bytes"] >= (8 * 4 + 4) * 4 for message in messages)
        assert len(traced(file, rank, "gradients", "e")) == UPDATES
    assert median(event["dur"] for event in traced(file, 1, "forward")) >= SLOW_S * 1e6
    # No rank has a message's sum before the other has sent it.
    for rank in (0, 1):
        received, sent = traced(file, rank, "gradients", "e"), traced(file, 1 - rank, "gradients", "b")
        assert all(end["ts"] > begin["ts"] for end, begin in zip(received, sent, strict=True))


def test_tracks_are_the_ranks_own(traces: Traces) -> None:
    file = traces("torchrun")
    for rank in (0, 1):
        named = {event["tid"]: event["args"]["name"] for event in traced(file, rank, "thread_name", "M")}
        assert {named[event["tid"]] for event in traced(file, rank, "forward")} == {"loop"}
        assert {named[event["tid"]] for event in traced(file, rank, "training")} == {"phase"}
        assert rank == 0 or 0 not in named  # Perfetto would draw it over another track


def test_one_process_has_a_timeline_too(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    job = [JOB, "auto", "0", "0"]
    outcome = run_job("python", 1, ["-m", "trainer", "trace", str(file), *job])
    assert outcome.code == 0, outcome.output
    assert [len(traced(file, 0, name)) for name in ("forward", "backward", "step")] == [2 * UPDATES] * 3
    assert not traced(file, 0, "gradients")
    assert traced(file, 0, "training")


def test_a_script_that_fails_leaves_its_ranks_own_timeline_and_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import trainer\nrun = trainer.init()\nrun.all_reduce(1.0)\nraise ValueError(run.rank)\n")
    outcome = run_job("torchrun", 2, ["-m", "trainer", "trace", str(tmp_path / "trace.json"), str(script)])
    assert outcome.code == 1, outcome.output
    assert "ValueError: " in outcome.output
    assert not (tmp_path / "trace.json").exists()
    left = [*tmp_path.glob("trace.rank-*.json")]
    assert left
    assert all(traced(file, int(file.stem[-1]), "all_reduce") for file in left)


def test_a_script_that_ends_its_process_group_ends_as_it_does_without(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist, trainer\nrun = trainer.init()\nrun.all_reduce(1.0)\n"
        "dist.destroy_process_group()\n"
    )
    outcome = run_job("torchrun", 2, ["-m", "trainer", "trace", str(tmp_path / "trace.json"), str(script)])
    assert outcome.code == 0, outcome.output
    assert "Traceback" not in outcome.output
    for rank in (0, 1):
        assert traced(tmp_path / f"trace.rank-{rank}.json", rank, "all_reduce")


def test_a_file_that_cannot_be_written_is_one_line_before_the_training(tmp_path: Path) -> None:
    file = tmp_path / "none" / "trace.json"
    job = [JOB, "auto", "0", "0"]
    outcome = run_job("python", 1, ["-m", "trainer", "trace", str(file), *job])
    assert outcome.code == exit_codes.MISTAKE, outcome.output
    assert outcome.output.count("\n") == 1, outcome.output
    assert str(file.parent) in outcome.output
