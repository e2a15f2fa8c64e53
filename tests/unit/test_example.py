"""The example: its command line, one whole run, and one line for every value that is not valid."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import examples.datasets
import trainer
from examples.datasets import DATASETS
from examples.networks import NETWORKS
from tests.distributed.harness import ROOT
from trainer import CheckpointConfig, InMemory, TrainerConfig, TrainerError
from trainer.config import DEVICES
from trainer.strategies import NAMES as STRATEGIES

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


# Each with what its line says.
INVALID = {
    "--strategy nope": (
        "strategy is 'nope'; valid are auto, single, horovod, ddp, fsdp, and module:Class for one of your own"
    ),
    "--dataset nope": "dataset is 'nope'; valid are auto, mnist, digits",
    "--precision nope": "precision is 'nope'; valid are fp32, bf16, fp16",
    "--device nope": "device is 'nope'; valid are auto, cpu, cuda",
    "--batch-size 0": "batch_size is 0; it must be at least 1",
    "--epochs 0": "epochs is 0; it must be at least 1",
    "--lr -1": "lr is -1.0; it must be finite and positive",
    "--lr nan": "lr is nan; it must be finite and positive",
    "--checkpoint-every soon": "'soon' is no interval between checkpoints; valid are, for instance, 30s, 200 (updates)",
    "--momentum -1": "momentum is -1.0; it must be at least 0 and below 1",
    "--output file/run": "output folder file/run cannot be written: file is a file, and no folder",
    "--strategy nope --precision nope": "precision is 'nope'",
}
# Runs the script with all command lines at once, each in a process that is forked when everything has been imported:
# that takes seconds, and has no part in what is tested. Nothing catches the exception on its way out.
EACH = """
import json, os, runpy, sys
from pathlib import Path
import sklearn.datasets, torch, trainer, trainer.strategies.single
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
script, lines = sys.argv[1], json.loads(sys.argv[2])
children = {}
for number, line in enumerate(lines):
    children[line] = os.fork()
    if children[line] == 0:
        os.dup2(os.open(f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [script, *line.split()]
        runpy.run_path(script, run_name="__main__")
codes = {line: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for line, child in children.items()}
print(json.dumps({line: [codes[line], Path(f"{number}.err").read_text()] for number, line in enumerate(lines)}))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and standard error of the script with every command line that is not valid."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "file").write_text("")
    lines = [f"--dataset digits --device cpu --output none {line}" for line in INVALID]
    done = run("-c", EACH, str(SCRIPT), json.dumps(lines), cwd=folder)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {line: (results[full][0], results[full][1]) for line, full in zip(INVALID, lines, strict=True)}


@pytest.mark.distributed
@pytest.mark.parametrize("line", INVALID)
def test_a_value_that_is_not_valid_is_one_line_and_no_traceback(refused: dict[str, tuple[int, str]], line: str) -> None:
    code, printed = refused[line]
    # The job may have been joined before, which is announced in a line of its own.
    lines = [text for text in printed.splitlines() if not text.startswith("trainer: rank 0 of 1")]
    assert "Traceback" not in printed
    assert len(lines) == 1
    assert lines[0].startswith(f"trainer: {INVALID[line]}")
    # An environment that fails may be another one at the next start; a mistake stays one.
    assert code == (1 if "cannot be written" in printed else 78)


# Every option, with the default that its help names; "" where it has none, or is a flag.
OPTIONS = {
    "--epochs": "1",
    "--batch-size": "64 of all ranks",
    "--accumulate": "1",
    "--lr": "0.1",
    "--momentum": "0.9",
    "--decay": "cosine",
    "--warmup-epochs": "0.25",
    "--seed": "0",
    "--network": "default",
    "--dataset": "auto",
    "--data-dir": "data",
    "--strategy": "auto, by launcher",
    "--device": "auto",
    "--precision": "fp32",
    "--compression": "none",
    "--sync-every": "1",
    "--compile": "",
    "--no-channels-last": "",
    "--checkpoint": "",
    "--checkpoint-every": "60s",
    "--target-accuracy": "",
    "--output": "in runs/",
}


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the script in this process."""
    monkeypatch.setattr(sys, "argv", ["mnist.py", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_help_explains_every_option_with_its_default_and_its_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    entries = {entry.split()[0].strip(","): " ".join(entry.split()) for entry in re.split(r"\n  (?=-)", text)[1:]}
    assert set(OPTIONS) <= set(entries)
    for name, default in OPTIONS.items():
        assert len(entries[name].split()) > 2, f"{name} is explained"
        assert f"(default: {default})" in entries[name] if default else "(default" not in entries[name]
    for name, choices in (
        ("--strategy", STRATEGIES),
        ("--dataset", DATASETS),
        ("--precision", ("fp32", "bf16", "fp16")),
        ("--compression", ("none", "fp16", "bf16", "powersgd:RANK")),
        ("--decay", ("none", "cosine")),
        ("--device", DEVICES),
    ):
        assert "|".join(choices) in entries[name]
    assert "{default,tutorial,large}" in entries["--network"]
    for launcher in ("horovodrun -np 2", "torchrun --nproc-per-node 2"):
        assert launcher in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--batch", "3"], "unrecognized arguments: --batch 3"),
        (["--nope"], "unrecognized arguments: --nope"),
        (["extra"], "unrecognized arguments: extra"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
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


RECIPE = TrainerConfig(eval_batch_size=1000, global_batch_size=64, warmup_epochs=0.25, channels_last=True)


class _StartedError(Exception):
    """Ends the script where it would train."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the script gives to `init` and to `Trainer`, which then ends it."""
    given: dict[str, Any] = {}
    data, init = InMemory(torch.zeros(20, 1, 28, 28), torch.arange(20) % 10), trainer.init

    def note_init(strategy: str, **settings: Any) -> trainer.Run:
        given.update(strategy=strategy, **settings)
        return init("single", device="cpu")

    def note_trainer(*_: Any, **settings: Any) -> None:
        given.update(settings)
        raise _StartedError

    monkeypatch.setattr(trainer, "init", note_init)
    monkeypatch.setattr(trainer, "Trainer", note_trainer)
    monkeypatch.setattr(examples.datasets, "load_dataset", lambda *_: (data, data))
    return given


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--accumulate 3", "accumulate", 3),
        ("--precision bf16", "precision", "bf16"),
        ("--compression fp16", "compression", "fp16"),
        ("--sync-every 4", "sync_every", 4),
        ("--decay none", "decay", "none"),
        ("--seed 9", "seed", 9),
        ("--no-channels-last", "channels_last", False),
        ("--compile", "compile", True),
        ("--device cpu", "device", "cpu"),
    ],
)
def test_an_option_changes_its_own_setting_and_no_other(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], arguments: str, field: str, value: Any
) -> None:
    with pytest.raises(_StartedError):
        start(monkeypatch, *arguments.split())
    assert given["config"] == dataclasses.replace(RECIPE, **{field: value})


def test_a_batch_per_rank_takes_the_place_of_the_global_one(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    with pytest.raises(_StartedError):
        start(monkeypatch, "--batch-size", "7")
    assert given["config"] == dataclasses.replace(RECIPE, global_batch_size=None, batch_size=7)


def test_the_other_defaults_are_the_librarys_own(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    with pytest.raises(_StartedError):
        start(monkeypatch)
    assert given["config"] == RECIPE
    assert (given["strategy"], given["output"], given["checkpoint"]) == ("auto", "auto", None)


def test_an_evaluations_batch_is_never_smaller_than_the_trainings(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    with pytest.raises(_StartedError):
        start(monkeypatch, "--batch-size", "2000")
    assert given["config"].eval_batch_size == 2000


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("", {"every_s": 60.0}),
        ("--checkpoint-every 2epochs", {"every_epochs": 2}),
        ("--checkpoint-every 200", {"every_updates": 200}),
    ],
)
def test_checkpoints_are_saved_where_and_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], arguments: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(_StartedError):
        start(monkeypatch, "--checkpoint", "there", *arguments.split())
    assert given["checkpoint"] == CheckpointConfig(folder="there", **settings)


@pytest.mark.parametrize(("name", "parameters"), [("default", 97_000), ("tutorial", 21_840), ("large", 6_352_650)])
def test_the_networks_have_the_size_and_the_outputs_that_they_claim(name: str, parameters: int) -> None:
    model = NETWORKS[name]()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.005)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


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
