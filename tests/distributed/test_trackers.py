"""The recipes of docs/trackers.md: each tracker gets every value once, in one run, though the job is interrupted."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.launching import PEERS
from tests.distributed.pages import units
from tests.distributed.snippets import RECIPES, in_shell

# One function for those of all trackers, of which each stands in a file as the page has it.
ALL_TRACKERS = """
import json, runpy
from pathlib import Path

functions = {file.stem: runpy.run_path(str(file))["track"] for file in sorted(Path("trackers").glob("*.py"))}

def track(earlier):
    ids, logs = json.loads(earlier or "{}"), []
    for name, function in functions.items():
        ids[name], log = function(ids.get(name, ""))
        logs.append(log)
    return json.dumps(ids), lambda values, step: [log(values, step) for log in logs] and None
"""
# The recipe as it stands on the page, in the job's first start with a scheduler's signal to rank 0 after some updates.
START = """
import os, runpy, signal
from torch.optim import optimizer
updates = 0
def interrupt(*arguments):
    global updates
    updates += 1
    if updates == int(os.environ.get("INTERRUPT", 0)) and os.environ.get("RANK") == "0":
        signal.raise_signal(signal.SIGUSR2)
optimizer.register_optimizer_step_post_hook(interrupt)
runpy.run_path("recipe.py", run_name="__main__")
"""
PYTHON = f"{PEERS}/bin/python"
FIRST_START = f"INTERRUPT=70 {PYTHON} -m torch.distributed.run --standalone --nproc-per-node 2 start.py"
NAMES = {"Trainer": {"train/loss", "lr", "validation/loss"}, "own loop": {"train/loss"}}
SCRIPTS = {"Trainer": "class Tracked(trainer.Callback)", "own loop": "run.log_to(log)"}


def block(containing: str) -> str:
    """Return the page's one block with these words."""
    (text,) = [unit.text for unit in units("python") if unit.page == RECIPES and containing in unit.text]
    return text


def of_mlflow(folder: Path) -> Iterator[tuple[str, str, int]]:
    yield from sqlite3.connect(folder / "mlflow.db").execute("select run_uuid, key, step from metrics")


def of_tensorboard(folder: Path) -> Iterator[tuple[str, str, int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for path in {file.parent for file in folder.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(path)).Reload()
        yield from (
            (str(path), name, point.step) for name in events.Tags()["scalars"] for point in events.Scalars(name)
        )


TRACKERS: dict[str, Callable[[Path], Iterator[tuple[str, str, int]]]] = {
    "import mlflow": of_mlflow,
    "import SummaryWriter": of_tensorboard,
}


Points = dict[str, list[tuple[str, str, int]]]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Points, Points]]:
    """Runs a script with all trackers, once; returns each tracker's points after an interruption and after the end."""

    @cache
    def track(script: str) -> tuple[Points, Points]:
        folder = tmp_path_factory.mktemp("tracked")
        (folder / "trackers").mkdir()
        for number, tracker in enumerate(TRACKERS):
            (folder / f"trackers/tracker_{number}.py").write_text(block(tracker))
        (folder / "recipe.py").write_text(f"{ALL_TRACKERS}\n\n{block(SCRIPTS[script])}\n")
        (folder / "start.py").write_text(START)
        environment = {"TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder), "GIT_PYTHON_REFRESH": "quiet"}
        first = in_shell(folder, FIRST_START, environment)
        assert (first.code, "exitcode  : 75" in first.output) == (1, True), first.output  # which torchrun makes a 1
        before = {name: list(read(folder)) for name, read in TRACKERS.items()}
        second = in_shell(folder, f"{PYTHON} start.py", environment)
        assert second.code == 0, second.output
        return before, {name: list(read(folder)) for name, read in TRACKERS.items()}

    return track


@pytest.mark.slow
@pytest.mark.needs("peers")
@pytest.mark.parametrize("script", ["Trainer", "own loop"])
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_run_that_goes_on_is_one_run_of_the_tracker(
    tracked: Callable[[str], tuple[Points, Points]], tracker: str, script: str
) -> None:
    before, after = (found[tracker] for found in tracked(script))
    assert min(step for _, _, step in before) == 50
    assert {run for run, _, _ in after} == {run for run, _, _ in before}, "it began another run"
    assert len({run for run, _, _ in after}) == 1
    assert len(after) == len(set(after))
    assert {name for _, name, _ in after} == NAMES[script]
    assert {50, 100, 150, 200} <= {step for _, name, step in after if name == "train/loss"}
