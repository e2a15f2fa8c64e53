"""The scaling test: ranks that share cores are predicted from an exchange beside computing ranks."""

from __future__ import annotations

import pytest
import scaling_test
from scaling.jobs import JobError, Plan
from scaling.models import Network, Shape
from scaling.results import Results
from tqdm import tqdm

from tests.unit.scaling_results import FAST, FOUR, SIZE, SLOW, make_results


@pytest.fixture
def results() -> Results:
    made = make_results()
    made.networks["horovod"] = Network(local=FAST, remote=FAST)  # the cores limit the exchange, not a link
    return made


def test_ranks_that_share_cores_are_predicted_from_an_exchange_beside_computing(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def time_beside_compute(plan: Plan, shape: Shape, strategy: str, size: int, compute_s: float) -> float:
        asked.append((shape, strategy, size, compute_s))
        return (2.0, 3.0, 2.5)[len(asked) - 1]

    monkeypatch.setattr(scaling_test, "time_beside_compute", time_beside_compute)
    for run in results.runs:
        scaling_test._measure_beside_compute(results, run, tqdm(disable=True))
    assert [one[:3] for one in asked] == [(FOUR, "horovod", SIZE)] * 3  # four ranks on two cores, and not 1x1
    assert [one[3] for one in asked] == pytest.approx([0.1] * 3)
    (_, four) = results.rows()
    assert four.predicted is not None
    assert four.predicted.step == pytest.approx(2.5)
    assert four.predicted_samples_per_s == pytest.approx(400 / 2.5)


def test_accumulated_steps_are_computed_between_two_exchanges(results: Results) -> None:
    for run in results.alone[100, 1]:
        assert run.timing is not None
        run.timing["updates"] = 5  # in 10 steps
    results.beside_compute[FOUR, "horovod", 100] = [3.0]
    assert results.computed_between(results.runs[1]) == pytest.approx(0.2)
    (_, four) = results.rows()
    assert four.predicted is not None
    assert four.predicted.step == pytest.approx(1.5)


def test_ranks_with_a_core_each_need_no_exchange_beside_computing(results: Results) -> None:
    run = next(run for run in results.runs if run.shape == FOUR)
    assert run.timing is not None
    assert results.computed_between(run.ended(timing={**run.timing, "machines": 2})) is None
    # Nor is there one for ranks with several threads, as the measurement computes with one.
    results.alone[100, 2] = results.alone[100, 1]
    assert results.computed_between(run.ended(timing={**run.timing, "threads": 2})) is None


def test_an_exchange_that_a_backward_pass_hides_is_predicted_from_its_parts(results: Results) -> None:
    assert results.computed_between(results.runs[1]) is not None
    results.networks["horovod"] = Network(local=FAST, remote=SLOW)
    assert results.computed_between(results.runs[1]) is None  # as the measurement has one after the other


def test_what_fails_beside_computing_leaves_the_prediction_from_parts(
    results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results.rows()

    def fail(*_: object) -> float:
        raise JobError("no route")

    monkeypatch.setattr(scaling_test, "time_beside_compute", fail)
    scaling_test._measure_beside_compute(results, results.runs[1], tqdm(disable=True))
    assert "cannot be measured: no route" in capsys.readouterr().err
    assert results.rows() == before
