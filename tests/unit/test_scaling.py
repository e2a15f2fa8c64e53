"""The scaling test: options, advice, evaluation and reports."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scaling.advice import Known, Measured, advise, summarize
from scaling.low_rank import LowRank
from scaling.report import render_text, write_page
from scaling.results import Results
from scaling.runs import Run, Trial

from tests.unit.scaling_results import PAIR, SIZE, SLOW, make_results, timing
from trainer import RunConfig


def measured(**changes: Any) -> Measured:
    values: dict[str, Any] = {
        "shape": "2x2", "strategy": "horovod", "ranks": 4, "input": 0.0, "compute": 0.1, "exchange": 0.4,
        "waiting": 0.0, "hidden": 0.0, "gradient_bytes": SIZE, "samples_per_s": 800.0, "efficiency": 0.2,
        "cores": 4, "threads": 4, "on_cpu": True, "workers": None,
    }  # fmt: skip
    return Measured(**{**values, **changes})


def test_advice_has_its_predicted_gain() -> None:
    half_size_ratio = SLOW.seconds(SIZE / 2) / SLOW.seconds(SIZE)
    found = advise(measured(hidden=0.05), [], Known(half_size_ratio=half_size_ratio, low_rank_s=0.02))
    approximate, accumulate, average, compress = found
    assert approximate.options == ("--compression", "powersgd:8")
    assert approximate.gain == pytest.approx(0.5 / (0.1 + 0.02))
    assert average.options == ("--sync-every", "8")
    assert average.gain == pytest.approx(0.5 / (0.1 + (0.4 + 0.05) / 8))
    assert accumulate.options == ("--accumulate", "8")
    assert accumulate.gain == pytest.approx(0.5 / (0.1 + 0.4 / 8))
    assert compress.options == ("--compression", "bf16")
    saved = (0.4 + 0.05) * (1 - half_size_ratio)
    assert compress.gain == pytest.approx(0.5 / (0.5 - saved))
    text = summarize(measured(), [accumulate, compress], SLOW)
    assert "The link carries 0.1 Gbit/s; a small message takes 1 ms" in text
    assert "the exchange takes 4 × the compute" in text
    assert "8 threads share 4 cores, which limits the efficiency to 50%" in summarize(measured(threads=8), [], None)
    gain = f"{accumulate.gain:.2g}"
    assert f"Advice: accumulate 8 (a global batch 8 times as large) for about {gain} ×, or use bf16" in text


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, {"--compression", "--accumulate", "--sync-every"}),
        ({"compression": "powersgd:4"}, {"--accumulate", "--sync-every"}),
        ({"sync_every": 4}, {"--compression", "--accumulate"}),
        ({"precision": "fp16"}, {"--compression", "--accumulate"}),  # bf16, and no rounds
    ],
)
def test_nothing_is_advised_that_the_script_does_or_that_does_not_go_with_it(
    settings: dict[str, Any], left: set[str]
) -> None:
    known = Known(half_size_ratio=0.5, low_rank_s=0.02, config=RunConfig(**settings))
    assert {advice.options[0] for advice in advise(measured(exchange=1.0), [], known)} == left


def test_a_predicted_gain_is_to_be_larger_than_a_measured_one() -> None:
    run = measured(exchange=0.018)  # accumulation would gain 1.15
    assert advise(run, [], Known(half_size_ratio=0.5, low_rank_s=0.001)) == []
    assert "no known change is predicted to gain a fifth, or was measured to gain a tenth" in summarize(run, [], None)
    others = [replace(run, strategy="ring", samples_per_s=1.15 * run.samples_per_s)]
    others += [measured(shape="1x2", ranks=2, samples_per_s=1600.0)]
    found = advise(run, others, Known(low_rank_s=0.001))
    assert [one.what for one in found] == ["stay with 1x2 (horovod)", "take strategy ring"]
    assert found[1].gain == pytest.approx(1.15)


@pytest.mark.parametrize(
    ("workers", "changes", "advised", "gain"),
    [
        (0, {"input": 0.25}, "3", 0.35 / 0.1),  # 0.25 s of decoding in 0.1 s of a step
        (2, {"input": 0.06}, "4", 0.16 / 0.1),  # two batches in 0.32 s, so one worker takes that for each
        # No more than the rank has cores, which are busy for 0.225 s of each step.
        (0, {"input": 0.25, "cores": 2, "threads": 2}, "2", 0.35 / ((0.25 + 2 * 0.1) / 2)),
        # The rank decodes for up to the whole step, beside its GPU.
        (0, {"input": 0.25, "threads": 8, "on_cpu": False}, "4", 0.35 / 0.1),
    ],
)
def test_a_rank_that_waits_for_its_loader_is_told_how_many_workers_it_wants(
    workers: int, changes: dict[str, Any], advised: str, gain: float
) -> None:
    values = {"shape": "1x1", "ranks": 1, "cores": 8, "threads": 1, "exchange": 0.0, "workers": workers, **changes}
    (found,) = advise(measured(**values), [], Known())
    assert found.options == ("--workers", advised)
    assert found.gain == pytest.approx(gain)
    assert f"of a step: a rank wants {measured(**values).wanted_workers} workers" in summarize(
        measured(**values), [found], None
    )
    in_memory = measured(**{**values, "workers": None})
    assert "though the data is in memory" in summarize(in_memory, [], None)
    assert advise(in_memory, [], Known()) == []


@pytest.fixture
def results() -> Results:
    return make_results()


def test_rows_are_medians_with_speedup_efficiency_and_error(results: Results) -> None:
    one, four = results.rows()
    assert (one.runs, four.runs) == (3, 3)
    assert four.measured.samples_per_s == pytest.approx(400 / 2.2)
    assert (four.least, four.most) == pytest.approx((400 / 9, 200))
    assert four.epoch_s == pytest.approx(60000 * 2.2 / 400)
    assert four.speedup == pytest.approx(400 / 2.2 / (100 / 0.08))
    assert four.measured.efficiency == pytest.approx(400 / 2.2 / 4000)
    assert four.predicted is not None
    assert four.predicted_samples_per_s is not None
    assert four.predicted.compute == pytest.approx(0.2)  # four ranks on two cores
    assert four.predicted.waiting == pytest.approx(
        math.sqrt(2) * 0.025
    )  # of two ranks, the slower takes 0.15 s in 3 of 4 cases
    assert four.error == pytest.approx(four.predicted_samples_per_s / (400 / 2.2) - 1)
    assert one.predicted is None
    assert {predicted.shape.ranks for _, predicted, _ in results.larger()} == {8, 16, 64}


def test_advice_with_an_option_can_be_tried(results: Results) -> None:
    results.low_rank = LowRank(messages=(40_000, 40_000), seconds=0.1)
    trials = {run.options: trial for run, trial in results.trials()}
    rounds = ("--sync-every", "4", "--compression", "powersgd:8")
    single = [("--compression", "powersgd:8"), ("--accumulate", "8"), ("--sync-every", "8"), ("--compression", "bf16")]
    assert list(trials) == [rounds, *single]
    assert trials["--compression", "powersgd:8"].base == pytest.approx(400 / 2.2)


@pytest.fixture
def partial_results(results: Results) -> Results:
    """Results of an interrupted test, with a trial and with failures."""
    run, trial = next(results.trials())
    results.tried.append((run.ended(timing=timing(1.1, 400)), Trial(advice=trial.advice, base=trial.base)))
    results.runs.append(
        Run(shape=PAIR, strategy="ring", scaling="weak", round=1, batch=100).ended(problem="no <such> host")
    )
    results.tried.append((run.ended(problem="connection lost"), trial))
    results.no_network = "no route"
    results.baselines.alone[50, 1] = []  # interrupted before the first run
    results.interrupted = True
    return results


def test_text_and_page_have_the_same_content(partial_results: Results, tmp_path: Path) -> None:
    write_page(tmp_path / "s.html", partial_results)
    page, text = (tmp_path / "s.html").read_text(), render_text(partial_results)
    for part in (
        "2x2 under horovod: efficiency 5%", "measured 2.00 ×", "Interrupted", "ring weak batch 100",
        "connection lost", "the network cannot be measured: no route",
    ):  # fmt: skip
        assert part in text
        assert part in page
    assert "no <such> host" in text
    assert "no &lt;such&gt; host" in page
    assert "<b>:2" not in page
    assert not re.search(r"<(script|link|img|iframe)\b|url\(http|(src|href)=\"(?!#)", page)
    for name in ("Throughput", "Efficiency", "horovod, weak", "2x2"):
        assert re.search(f"<!-- .*{name}", page), name
