"""The example: its command line, one whole run, and one line for every value that is not valid."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import examples.datasets
from tests.distributed.harness import ROOT
from trainer import InMemory, TrainerError

SCRIPT = ROOT / "examples/mnist.py"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, timeout=240, check=False
    )


@pytest.mark.distributed
def test_one_epoch_on_the_digits_ends_with_the_test_accuracy(tmp_path: Path) -> None:
    arguments = ["--dataset", "digits", "--epochs", "1", "--batch-size", "20", "--output", "none", "--device", "cpu"]
    done = run(str(SCRIPT), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = re.fullmatch(r"test accuracy (\d+\.\d\d) % \(evaluated 297/297\)", done.stdout.splitlines()[-1])
    assert last is not None
    assert float(last[1]) > 85  # it is 93; ten digits at random give 10
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "--output none leaves no record"


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the script in this process."""
    monkeypatch.setattr(sys, "argv", ["mnist.py", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--network", "nope"], "argument --network: invalid choice: 'nope' (choose from "),
    ],
)
def test_what_is_no_option_is_refused_and_nothing_is_guessed(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, *arguments)
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: mnist.py …"
    assert error.startswith(f"mnist.py: error: {line}")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Twenty images that are all alike, each with a label of its own kind: nothing to learn from."""
    data = InMemory(torch.zeros(20, 1, 28, 28), torch.arange(20) % 10)
    monkeypatch.setattr(examples.datasets, "load_dataset", lambda *_: (data, data))
    monkeypatch.chdir(tmp_path)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    start(monkeypatch, "--device", "cpu", "--epochs", "1", *arguments)


@pytest.mark.usefixtures("tiny")
def test_an_accuracy_below_the_target_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(monkeypatch, "--output", "none", "--target-accuracy", "10")
    with pytest.raises(TrainerError, match=r"^test accuracy 10\.00 % is below the target of 11\.0 %$"):
        main(monkeypatch, "--output", "none", "--target-accuracy", "11")
    assert capsys.readouterr().out.count("test accuracy 10.00 % (evaluated 20/20)\n") == 2


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("arguments", "folder"), [((), "runs/mnist-*"), (("--output", "mine"), "mine")])
def test_the_record_lies_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], folder: str
) -> None:
    main(monkeypatch, "--seed", "4", *arguments)
    (settings,) = tmp_path.glob(f"{folder}/settings.json")
    assert json.loads(settings.read_text())["config"]["seed"] == 4


def test_a_half_known_launcher_is_one_line_and_no_traceback() -> None:
    """The hook that prints the error reads the same environment."""
    env = {**os.environ, "WORLD_SIZE": "2", "RANK": "1"}
    script = (
        "from trainer.cluster.environment import read_launch; from trainer.watch.failure import report_failures; "
        "report_failures(); read_launch()"
    )
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.startswith("trainer: WORLD_SIZE is 2, but nothing")
    assert len(done.stderr.splitlines()) == 1
