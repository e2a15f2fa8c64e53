"""The scaling test: ranks that share a machine are predicted from ranks that compute beside one another."""

from __future__ import annotations

import pytest
import scaling_test
from scaling.baselines import ranks_at_once
from scaling.jobs import Plan
from scaling.models import Network, Shape
from scaling.results import Results

from tests.unit.scaling_results import FAST, FOUR, SIZE, SLOW, make_results, timing


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
        scaling_test._measure_beside_compute(results, run)
    assert [one[:3] for one in asked] == [(FOUR, "horovod", SIZE)] * 3  # four ranks on two cores, and not 1x1
    assert [one[3] for one in asked] == pytest.approx([0.1] * 3)
    (_, four) = results.rows()
    assert four.predicted is not None
    assert four.predicted.step == pytest.approx(2.5)
    assert four.predicted_samples_per_s == pytest.approx(400 / 2.5)


def test_what_is_not_measured_beside_computing_is_predicted_from_its_parts(results: Results) -> None:
    run = next(run for run in results.runs if run.shape == FOUR)
    assert run.timing is not None
    assert results.computed_between(run) is not None
    assert results.computed_between(run.ended(timing={**run.timing, "device": "cuda"})) is None
    results.baselines.alone[100, 2] = results.baselines.alone[100, 1]  # the measurement computes with one thread
    assert results.computed_between(run.ended(timing={**run.timing, "threads": 2})) is None
    results.networks["horovod"] = Network(local=FAST, remote=SLOW)  # the backward pass hides a part of the exchange
    assert results.computed_between(run) is None


@pytest.mark.parametrize(
    ("changes", "at_once"),
    [
        ({"world_size": 2}, 2),
        ({"world_size": 4}, 2),  # on two cores
        ({"world_size": 4, "cores": 8, "machines": 2}, 2),
        ({"world_size": 4, "cores": 8, "threads": 4}, 2),
        ({"world_size": 4, "cores": 8, "device": "cuda"}, 1),
    ],
)
def test_ranks_of_a_machine_with_a_core_each_compute_at_once(
    results: Results, changes: dict[str, object], at_once: int
) -> None:
    assert ranks_at_once(timing(1.0, 100, **changes)) == at_once


def test_a_rank_is_predicted_from_ranks_that_compute_side_by_side(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def time_steps(plan: Plan, shape: Shape, strategy: str, batch: int, **options: object) -> dict[str, object]:
        asked.append((shape, strategy, batch, options["threads"], options["exchanges"]))
        return timing(0.14, 100, world_size=2, compute=0.12, exchange=0.01, waiting=0.01)

    monkeypatch.setattr(scaling_test, "time_steps", time_steps)
    (_, before) = results.rows()
    for run in results.runs:
        if run.shape == FOUR and run.timing is not None:
            for _ in range(2):  # two strategies of a round
                run_timing = {**run.timing, "world_size": 4}
                scaling_test._measure_side_by_side(results, run, run_timing)
    assert asked == [(Shape(hosts=1, per_host=2), "horovod", 100, 1, False)] * 3  # once a round
    for run in results.runs:
        if run.shape == FOUR and run.timing is not None:
            run.timing["world_size"] = 4
    (_, after) = results.rows()
    assert before.predicted is not None
    assert after.predicted is not None
    assert before.predicted.compute == pytest.approx(2 * 0.1)
    assert after.predicted.compute == pytest.approx(2 * 0.14)  # what is not all-reduced is computed, too
    assert after.measured.efficiency == before.measured.efficiency  # relative to single ranks
    assert [run.scaling for run in results.baselines.side_by_side_runs()] == ["side by side"] * 3


def test_more_hosts_are_predicted_from_the_nearest_number_of_ranks_side_by_side(results: Results) -> None:
    run = results.baselines.alone[100, 1][0]
    for count, compute in ((2, 0.2), (6, 0.6)):
        results.baselines.side_by_side[100, 1, count] = [
            run.ended(timing=timing(compute, 100, compute=compute, exchange=0))
        ]
    for _, predicted, efficiency in results.larger():  # two ranks on each host
        assert predicted.compute == pytest.approx(0.2)
        assert efficiency == pytest.approx(0.1 / predicted.step)
