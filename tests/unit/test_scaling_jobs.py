"""The jobs of the scaling test: how their hosts, shapes and batches are understood."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scaling import jobs
from scaling.jobs import JobError, Plan, parse_hosts, parse_shapes, time_steps
from scaling.models import Shape

from measuring import Finished
from tests.unit.scaling_results import timing
from trainer.errors import ConfigError

PLAN = Plan(hosts=parse_hosts("a:2,b:2"), script=["own.py"], batch_flag="--batch-size", steps=10, timeout_s=9)
FOUR = Shape(hosts=2, per_host=2)


def run_of(monkeypatch: pytest.MonkeyPatch, samples_per_step: int, ranks: int = 4) -> list[str]:
    """Have jobs take so many samples per step of all ranks; return the list that gets each job's command."""
    commands: list[str] = []

    def run(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Finished:
        commands.append(" ".join(command[-3:]))
        file = command[command.index("own.py") - 1]
        found = timing(0.1, samples_per_step, world_size=ranks, strategy="DDP")
        Path(file).write_text(json.dumps(found) + "\n")
        return Finished(code=0, stdout="", stderr="", seconds=1.0)

    monkeypatch.setattr(jobs, "_run", run)
    return commands


@pytest.mark.parametrize(("global_batch", "option"), [(False, "8"), (True, "32")])
def test_the_script_gets_the_samples_of_a_rank_or_of_all(
    monkeypatch: pytest.MonkeyPatch, global_batch: bool, option: str
) -> None:
    commands = run_of(monkeypatch, samples_per_step=32)
    time_steps(replace(PLAN, global_batch=global_batch), FOUR, "ddp", 8)
    assert commands == [f"own.py --batch-size {option}"]


@pytest.mark.parametrize(
    ("global_batch", "samples_per_step", "problem"),
    [
        (False, 8, "given --batch-size 8 on 4 ranks, the script took 2 {}; add --global-batch"),
        (True, 128, "given --batch-size 32 on 4 ranks, the script took 32 {}; leave --global-batch out"),
    ],
)
def test_a_batch_that_the_script_understands_otherwise_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, global_batch: bool, samples_per_step: int, problem: str
) -> None:
    run_of(monkeypatch, samples_per_step)
    with pytest.raises(JobError) as caught:
        time_steps(replace(PLAN, global_batch=global_batch), FOUR, "ddp", 8)
    assert str(caught.value) == problem.format("samples per rank and step, not 8")


def test_steps_that_are_not_full_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(monkeypatch, samples_per_step=27)
    assert time_steps(PLAN, FOUR, "ddp", 8)["samples"] == 270


def test_hosts_and_shapes() -> None:
    hosts = parse_hosts("a:2,b:2")
    assert [str(shape) for shape in parse_shapes(None, hosts)] == ["1x1", "1x2", "2x1", "2x2"]
    assert [str(shape) for shape in parse_shapes(None, parse_hosts("a:1"))] == ["1x1"]
    assert [str(shape) for shape in parse_shapes("2×2", hosts)] == ["1x1", "2x2"]
    for text in ("a:0", "a:2,", "a:two"):
        with pytest.raises(ConfigError, match="valid is host:ranks"):
            parse_hosts(text)
    with pytest.raises(ConfigError, match="--shapes is '2by2'; valid is hosts x ranks on each"):
        parse_shapes("2by2", hosts)
