"""The recipes of docs/trackers.md: each tracker gets every value once, in one run, though the job is interrupted."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.launching import PEERS
from benchmarks.trackers import measure, of_page
from tests.distributed.pages import units
from tests.distributed.snippets import RECIPES, in_shell

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


def of_wandb(folder: Path) -> Iterator[tuple[str, str, int]]:
    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        read = subprocess.run([PYTHON, "-c", READ_WANDB, file], capture_output=True, text=True, check=True)
        for item in json.loads(read.stdout):
            step = int(item.pop("_step"))
            yield from ((file.parent.name.split("-")[-1], name, step) for name in item if not name.startswith("_"))


# A log in LevelDB's format: after 7 bytes, blocks of 32 KiB of records, of which each begins with CRC, length and type.
READ_WANDB = f"""
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record
data, place, record, items = open(sys.argv[1], "rb").read(), 7, b"", []
while place + 7 <= len(data):
    _, length, kind = struct.unpack("<IHB", data[place : place + 7])
    record += data[place + 7 : place + 7 + length]
    place += 7 + length
    place += {2**15} - place % {2**15} if {2**15} - place % {2**15} < 7 else 0
    if kind in (1, 4):
        entry, record = Record.FromString(record), b""
        if entry.history.item:
            items.append({{item.key or "/".join(item.nested_key): item.value_json for item in entry.history.item}})
print(json.dumps(items))
"""


def of_mlflow(folder: Path) -> Iterator[tuple[str, str, int]]:
    yield from sqlite3.connect(folder / "mlflow.db").execute("select run_uuid, key, step from metrics")


def of_trackio(folder: Path) -> Iterator[tuple[str, str, int]]:
    for run, step, values in sqlite3.connect(folder / "trackio/digits.db").execute(
        "select run_id, step, metrics from metrics"
    ):
        yield from ((run, name, step) for name in json.loads(values))


def of_tensorboard(folder: Path) -> Iterator[tuple[str, str, int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for path in {file.parent for file in folder.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(path)).Reload()
        yield from (
            (str(path), name, point.step) for name in events.Tags()["scalars"] for point in events.Scalars(name)
        )


TRACKERS: dict[str, Callable[[Path], Iterator[tuple[str, str, int]]]] = {
    "import wandb": of_wandb,
    "import mlflow": of_mlflow,
    "import trackio": of_trackio,
    "import SummaryWriter": of_tensorboard,
}
# A tracker's function is the same in both scripts.
PAIRS = [
    pytest.param(name, script, marks=pytest.mark.slow if script == "own loop" and read is not of_wandb else ())
    for name, read in TRACKERS.items()
    for script in SCRIPTS
]


@pytest.mark.needs("peers")
@pytest.mark.parametrize(("tracker", "script"), PAIRS)
def test_a_run_that_goes_on_is_one_run_of_the_tracker(tmp_path: Path, tracker: str, script: str) -> None:
    read = TRACKERS[tracker]
    (tmp_path / "recipe.py").write_text(f"{block(tracker)}\n\n{block(SCRIPTS[script])}\n")
    (tmp_path / "start.py").write_text(START)
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "GIT_PYTHON_REFRESH": "quiet"}
    first = in_shell(tmp_path, FIRST_START, environment)
    assert (first.code, "exitcode  : 75" in first.output) == (1, True), first.output  # which torchrun makes a 1
    before = list(read(tmp_path))
    assert min(step for _, _, step in before) == 50

    second = in_shell(tmp_path, f"{PYTHON} start.py", environment)
    assert second.code == 0, second.output
    points = list(read(tmp_path))
    assert {run for run, _, _ in points} == {run for run, _, _ in before}, "it began another run"
    assert len({run for run, _, _ in points}) == 1
    assert len(points) == len(set(points))
    assert {name for _, name, _ in points} == NAMES[script]
    assert {50, 100, 150, 200} <= {step for _, name, step in points if name == "train/loss"}


@pytest.mark.needs("peers")
def test_prometheus_reads_the_values_and_the_step(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(f"""
import sys, urllib.request
{block("import Gauge, start_http_server").replace("9200", "0")}
start = start_http_server
def start_http_server(*arguments, **options):
    global server
    server, _ = start(*arguments, **options)
earlier, log = track("")
log({{"train/loss": 0.5}}, 50)
print(urllib.request.urlopen(f"http://127.0.0.1:{{server.server_port}}/metrics").read().decode())
""")
    page = subprocess.run([PYTHON, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert 'training{name="train/loss"} 0.5\n' in page
    assert 'training{name="step"} 50.0\n' in page


def test_the_benchmark_finds_every_function_and_the_callback_of_the_page() -> None:
    functions, definition = of_page()
    assert list(functions) == ["Weights & Biases", "MLflow", "trackio", "TensorBoard", "Prometheus"]
    assert "class Tracked(trainer.Callback):" in definition


@pytest.mark.needs("peers")
def test_the_benchmark_measures_what_a_tracker_costs() -> None:
    low, median, high = measure("TensorBoard", pairs=2, steps=100)
    assert low <= median <= high
