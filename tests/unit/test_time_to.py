"""The time to a target on slow links: its table, its file, its options, and what it reads of a job."""

from __future__ import annotations

import subprocess
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import time_to
from benchmarks.time_to import Training, read, read_result, render, write
from benchmarks.time_to_job import TASKS, Clock, Result, evaluate, parse_settings
from trainer.errors import ConfigError, TrainerError


def _training(**changes: Any) -> Training:
    known: dict[str, Any] = {
        "link": "100mbit",
        "network": "mnist",
        "setting": "sync_every=8",
        "seed": 0,
        "target": 98.0,
    }
    return Training(**(known | changes))


def _result(**changes: Any) -> Result:
    known: dict[str, Any] = {"updates": 288, "reached": 288, "seconds": 1960.04, "score": 98.04, "per_s": 2119.6}
    return Result(**(known | changes))


def test_the_table_has_the_links_and_networks_in_order() -> None:
    text = _training(network="language_model", target=3.1)
    results = {
        _training(link="20ms"): _result(),
        text: _result(updates=128, reached=128, seconds=250.0, score=3.081, per_s=1024.0),
        _training(): _result(),
    }
    assert render(results).splitlines() == [
        "| link | network | setting | s to it | updates to it | score at the end | throughput |",
        "|---|---|---|---|---|---|---|",
        "| 100mbit | mnist to 98 % | sync_every=8 | 1,960.0 | 288 | 98.04 % | 2,120 samples/s |",
        "| 100mbit | language_model to 3.1 bits/byte | sync_every=8 | 250.0 | 128 | 3.08 bits/byte | 1,024 bytes/s |",
        "| 20ms | mnist to 98 % | sync_every=8 | 1,960.0 | 288 | 98.04 % | 2,120 samples/s |",
    ]


def test_the_table_has_medians_ranges_and_what_was_missed() -> None:
    missed = _result(updates=450, reached=None, seconds=900.0, score=97.5, per_s=100.0)
    results = {
        _training(): _result(updates=304, reached=304, seconds=10.0, per_s=100.0),
        _training(seed=1): _result(updates=320, reached=320, seconds=12.0, per_s=100.0),
        _training(seed=2): missed,
        _training(setting="compression=fp16"): missed,
    }
    assert render(results).splitlines()[2:] == [
        "| 100mbit | mnist to 98 % | sync_every=8 | 11.0 (10.0–12.0) | 312 (304–320), not in 450 "
        "| 98.04 (97.50–98.04) % | 100 (100–100) samples/s |",
        "| 100mbit | mnist to 98 % | compression=fp16 |  | not in 450 | 97.50 % | 100 samples/s |",
    ]


def test_results_are_read_as_they_were_written() -> None:
    results = {_training(): _result(), _training(seed=1): _result(reached=None)}
    assert read(write(results)) == results


def test_a_file_that_holds_something_else_is_told() -> None:
    strange = write({_training(link="isdn"): _result()})
    for text in ("no JSON", '{"rows": []}', '[{"training": {}, "result": {}}]', strange):
        with pytest.raises(TrainerError, match="has no results of"):
            read(text)


def test_the_result_is_found_behind_the_launchers_mark() -> None:
    line = 'time-to: {"updates": 16, "reached": null, "seconds": 1.5, "score": 84.4, "per_s": 159.0}'
    expected = Result(updates=16, reached=None, seconds=1.5, score=84.4, per_s=159.0)
    assert read_result(f"something\n{line}\n") == expected
    assert read_result(f"[1,0]<stdout>:{line}\n[1,1]<stdout>:bye\n") == expected
    assert read_result("time-to: nothing\n") is None


def test_settings_are_those_of_init() -> None:
    assert parse_settings("sync_every=8,outer_lr=0.7") == {"sync_every": 8, "outer_lr": 0.7}
    assert parse_settings("compression=powersgd:4") == {"compression": "powersgd:4"}


def test_targets_are_the_networks_own_unless_named() -> None:
    options = time_to._parse_args(["--to", "mnist=97"])
    assert options.targets == {"mnist": 97.0, "language_model": TASKS["language_model"].target}
    assert options.only == ["1gbit", "100mbit", "20ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "isdn"], "--only has 'isdn'; valid are unlimited, 1gbit, 100mbit, 20ms"),
        (["--networks", "resnet"], "--networks has 'resnet'; valid are mnist, language_model"),
        (["--to", "resnet=9"], "--to has 'resnet'; valid are mnist, language_model"),
        (["--to", "mnist"], "--to has 'mnist'; it is a network and a score, as in mnist=97"),
        (["--limit", "0"], "--limit is 0; it must be at least 1"),
        (["--settings", "fp16"], "has no setting 'fp16'"),
        (["--settings", "compression=zip"], "compression is 'zip'"),
    ],
)
def test_options_that_are_not_valid_take_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        time_to._parse_args(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def _docker(*outcomes: int | Exception, printed: str = "") -> Callable[..., Any]:
    """Return what stands for subprocess.run: the exit codes of its calls, one after the other."""
    left = list(outcomes)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return subprocess.CompletedProcess(command, outcome, stdout=printed)

    return run


@pytest.mark.parametrize(("code", "printed"), [(1, "time-to: {}"), (0, "")])
def test_a_training_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, code: int, printed: str) -> None:
    monkeypatch.setattr(time_to, "read_result", lambda text: _result() if text else None)
    monkeypatch.setattr(subprocess, "run", _docker(code, printed=printed))
    with pytest.raises(TrainerError, match=f"100mbit, mnist to 98, sync_every=8, seed 0: ended with code {code}"):
        time_to.launch(_training(), Namespace(limit=None, timeout=1.0))


def test_a_training_that_takes_too_long_is_ended_on_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, ...]] = []
    monkeypatch.setattr(subprocess, "run", _docker(subprocess.TimeoutExpired("docker", 5.0)))
    monkeypatch.setattr(time_to, "output", lambda *command: ended.append(command))
    with pytest.raises(TrainerError, match="has not ended after 5 s"):
        time_to.launch(_training(), Namespace(limit=None, timeout=5.0))
    assert ended == [("docker", "compose", "exec", "-T", "a", "pkill", "horovodrun")]


@pytest.mark.parametrize(
    ("codes", "message"), [((1,), "`docker compose up --build -d`"), ((0, 1), "the nodes have no MNIST")]
)
def test_nodes_that_are_not_there_or_have_no_data_are_told(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], message: str
) -> None:
    monkeypatch.setattr(subprocess, "run", _docker(*codes))
    with pytest.raises(TrainerError, match=message):
        time_to._prepare_nodes(["mnist"])
    monkeypatch.setattr(subprocess, "run", _docker(0))
    time_to._prepare_nodes(["language_model"])  # which needs no data


class _TwoRanks:
    """Stands for the handle of a rank whose peer takes a second longer from one stop to the next."""

    def barrier(self) -> None:
        """Return at once."""

    def all_gather(self, value: float) -> list[float]:
        return [value, value + 1.0]


def test_the_clock_counts_the_slowest_rank_and_leaves_the_evaluations_out(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 10.0, 50.0, 54.0])  # start, stop, start, stop
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    clock = Clock(_TwoRanks(), 400)  # type: ignore[arg-type]
    clock.stop(16)
    assert (clock.seconds, clock.per_s) == (10.0, 640.0)
    clock.start()
    clock.stop(32)
    assert (clock.seconds, clock.per_s) == (15.0, 1280.0)  # the first updates are left out once there are others


class _Averaging:
    """Stands for the handle of a rank whose peers have weights of which the mean is 0."""

    def all_reduce(self, value: torch.Tensor | float, reduction: str) -> torch.Tensor:
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else torch.tensor(value)


def test_an_evaluation_takes_the_mean_of_the_weights_and_leaves_them_as_they_are() -> None:
    own, tested = torch.nn.Linear(2, 256, bias=False), torch.nn.Linear(2, 256, bias=False)
    before = own.weight.clone()
    batches: Any = [(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))]
    score = evaluate(TASKS["language_model"], _Averaging(), own, tested, batches)  # type: ignore[arg-type]
    assert score == pytest.approx(8.0)  # bits of a byte by a network of weights 0
    assert torch.equal(own.weight, before)
    assert evaluate(TASKS["language_model"], _Averaging(), own, own, batches) != score  # type: ignore[arg-type]


def test_a_loss_is_reached_from_above() -> None:
    mnist, text = TASKS["mnist"], TASKS["language_model"]
    assert [mnist.reached(score, 98.0) for score in (97.99, 98.0, 98.01)] == [False, True, True]
    assert [text.reached(score, 3.1) for score in (3.11, 3.1, 3.09)] == [False, True, True]


def test_scores_are_sums_in_their_units() -> None:
    logits = torch.tensor([[0.0, 9.0], [0.0, 9.0]])
    assert TASKS["mnist"].score(logits, torch.tensor([1, 0])).item() == 100.0
    assert TASKS["language_model"].score(torch.zeros(3, 256), torch.tensor([0, 1, 2])).item() == pytest.approx(24.0)
