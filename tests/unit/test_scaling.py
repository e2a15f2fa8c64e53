"""The scaling test: its models, its advice, its figures and its page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scaling_test
from scaling.advice import Measured, advise, sentence
from scaling.jobs import Host, Plan, parse_hosts, parse_shapes
from scaling.models import (
    MODELS,
    Link,
    Network,
    Rank,
    Shape,
    hierarchical,
    model_of,
    of_ring,
    parameter_server,
    predict,
    ring,
)
from scaling.report import draw, show, tables, write_json, write_page
from scaling.results import Promise, Results, Run
from tqdm import tqdm

from trainer.errors import TrainerError


def line(latency_s: float, s_per_byte: float) -> Link:
    return Link(((0, latency_s), (10**9, latency_s + 10**9 * s_per_byte)))


SLOW, FAST = line(1e-3, 8e-8), line(1e-5, 1e-10)  # 100 Mbit/s, 80 Gbit/s
PAIR, FOUR = Shape(hosts=2, per_host=1), Shape(hosts=2, per_host=2)
SIZE = 25_000_000


def test_a_link_takes_what_was_measured_and_between_what_lies_between() -> None:
    link = Link(((4, 1e-3), (1000, 2e-3), (2000, 10e-3)))
    assert [link.seconds(size) for size in (1, 4, 502, 1000, 1500, 3000)] == pytest.approx(
        [1e-3, 1e-3, 1.5e-3, 2e-3, 6e-3, 18e-3]
    )
    assert link.latency_s == 1e-3
    assert link.s_per_byte == pytest.approx(9e-3 / 1996)
    assert link.slowed(2).seconds(1500) == pytest.approx(12e-3)
    assert SLOW.gbit_per_s == pytest.approx(0.1)
    assert Link(((4, 0.002),)).seconds(10**6) == 0.002
    assert Link(((4, 0.002), (8, 0.001))).gbit_per_s == float("inf")


@pytest.mark.parametrize("model", ["ring", "tree", "hierarchical", "parameter server"])
def test_two_ranks_take_what_was_measured_between_two(model: str) -> None:
    network = Network(local=FAST, remote=SLOW)
    assert MODELS[model](SIZE, PAIR, network) == pytest.approx(SLOW.seconds(SIZE))
    if model != "parameter server":
        assert MODELS[model](SIZE, Shape(hosts=1, per_host=2), network) == pytest.approx(FAST.seconds(SIZE))


def test_models_count_the_bytes_that_the_slow_link_carries() -> None:
    network = Network(local=line(0, 0), remote=line(0, 1))
    assert ring(1, FOUR, network) == pytest.approx(2 * 3 / 4)
    assert hierarchical(1, FOUR, network) == pytest.approx(2 * 1 / 2)
    assert parameter_server(1, FOUR, network) == 2  # one for each rank on the other host
    assert parameter_server(1, Shape(hosts=8, per_host=2), network) == 14
    assert ring(1, Shape(hosts=32, per_host=2), network) == pytest.approx(2 * 63 / 64)


def test_the_ring_is_limited_by_latency_where_there_are_many() -> None:
    network = Network(local=FAST, remote=line(1e-3, 0))
    assert ring(4, Shape(hosts=64, per_host=1), network) == pytest.approx(63e-3)
    assert MODELS["tree"](4, Shape(hosts=64, per_host=1), network) == pytest.approx(6e-3)


def test_a_ring_of_three_tells_what_lies_between_two() -> None:
    shape, network = Shape(hosts=3, per_host=1), Network(remote=SLOW)
    three = Link(tuple((size, ring(size, shape, network)) for size in (4, 10**6, 10**8)))
    for size in (3, 10**5, 10**7):
        assert of_ring(three, 3).seconds(size) == pytest.approx(SLOW.seconds(size), rel=1e-3)


def test_messages_count_at_their_own_size() -> None:
    """Up to 100 kB a message goes at once, larger ones are announced: what a line through both would blur."""
    remote = Link(((4, 1e-3), (200_000, 1e-3), (200_001, 3e-3), (800_000, 3e-3)))
    assert ring(400_000, FOUR, Network(remote=remote)) == pytest.approx(3 * 1e-3)
    assert ring(800_000, FOUR, Network(remote=remote)) == pytest.approx(3 * 3e-3)


def test_larger_rings_use_a_connection_one_way() -> None:
    network = Network(local=FAST, remote=SLOW, one_way=line(1e-3, 4e-8))
    assert ring(SIZE, FOUR, network) == pytest.approx(3 * network.one_way.seconds(SIZE / 2))  # type: ignore[union-attr]
    assert ring(SIZE, PAIR, network) == pytest.approx(SLOW.seconds(SIZE))
    assert MODELS["tree"](SIZE, PAIR, network) == pytest.approx(SLOW.seconds(SIZE))


def test_horovod_does_what_mpi_is_told() -> None:
    assert model_of("horovod", SIZE, FOUR) == "ring"
    assert [model_of("horovod", size, FOUR) for size in (2**20 - 4, 2**20)] == ["tree", "ring"]
    assert [model_of("horovod", size, Shape(hosts=3, per_host=2)) for size in (2**21 - 4, 2**21)] == ["tree", "ring"]
    assert model_of("horovod", SIZE, PAIR) == model_of("horovod", SIZE, Shape(hosts=1, per_host=4)) == "tree"


def test_a_step_is_compute_and_what_nothing_hides() -> None:
    rank = Rank(input=0.001, compute=0.049, window=0.02, gradient_bytes=SIZE)
    network = Network(local=FAST, remote=SLOW)
    guess = predict(rank, FOUR, network, "ring")
    assert guess.exchange == pytest.approx(ring(SIZE, FOUR, network))
    assert guess.step == pytest.approx(0.05 + guess.exchange - 0.02)
    crowded = predict(rank, FOUR, network, "ring", crowd=2)
    assert crowded.compute == pytest.approx(0.1)
    assert crowded.exchange == guess.exchange  # a slow link does not wait for cores
    alike = Network(local=FAST, remote=FAST)
    assert predict(rank, FOUR, alike, "ring", crowd=2).exchange == pytest.approx(
        2 * predict(rank, FOUR, alike, "ring").exchange
    )
    assert predict(rank, Shape(hosts=1, per_host=1), network, "ring").exposed == 0


def test_an_exchange_that_is_work_for_cores_hides_where_one_is_free() -> None:
    rank = Rank(input=0, compute=0.1, window=0.05, gradient_bytes=SIZE)
    network, pair = Network(local=line(0, 1e-9)), Shape(hosts=1, per_host=2)
    whole = network.local.seconds(SIZE)  # type: ignore[union-attr]
    assert predict(rank, pair, network, "ring", crowd=1.0).exposed == pytest.approx(whole)
    assert predict(rank, pair, network, "ring", crowd=0.5).exposed == pytest.approx(whole / 6)  # of six pieces the last
    assert predict(rank, pair, network, "ring", crowd=0.5).compute == pytest.approx(0.1)


def test_ranks_wait_for_the_slowest_of_them() -> None:
    even = tuple((at + 0.5) / 100 for at in range(100))  # as likely quick as slow: the largest of N is N/(N+1)
    rank = Rank(input=0, compute=0.5, window=0, gradient_bytes=4, own=even)
    assert [rank.waiting(count) for count in (1, 2, 4, 64)] == pytest.approx(
        [0, 2 / 3 - 1 / 2, 4 / 5 - 1 / 2, 64 / 65 - 1 / 2], abs=1e-3
    )
    network = Network(local=line(0, 0), remote=line(0, 0))
    assert predict(rank, FOUR, network, "ring").step == pytest.approx(0.8, abs=1e-3)
    shared = predict(rank, FOUR, network, "ring", crowd=2)
    assert shared.waiting == pytest.approx(math.sqrt(2) / 6, abs=1e-3)
    assert predict(rank, Shape(hosts=1, per_host=1), network, "ring").waiting == pytest.approx(0)


def test_one_message_hides_behind_nothing() -> None:
    rank = Rank(input=0, compute=1.0, window=0.9, gradient_bytes=1_000_000)
    guess = predict(rank, PAIR, Network(remote=SLOW), "ring")
    assert guess.exposed == guess.exchange


def measured(**changes: Any) -> Measured:
    values: dict[str, Any] = {
        "shape": "2x2", "strategy": "horovod", "ranks": 4, "input": 0.0, "compute": 0.1, "exchange": 0.4,
        "waiting": 0.0, "hidden": 0.0, "gradient_bytes": SIZE, "samples_per_s": 800.0, "efficiency": 0.2,
        "cores": 4, "threads": 4,
    }  # fmt: skip
    return Measured(**{**values, **changes})


def test_advice_promises_what_the_arithmetic_gives() -> None:
    halved = SLOW.seconds(SIZE / 2) / SLOW.seconds(SIZE)
    accumulate, compress = advise(measured(), [], halved)
    assert accumulate.options == ("--accumulate", "8")
    assert accumulate.gain == pytest.approx(0.5 / (0.1 + 0.4 / 8))
    assert compress.options == ("--compression", "fp16")
    saved = 0.4 * (1 - halved)
    assert compress.gain == pytest.approx(0.5 / (0.5 - saved))
    text = sentence(measured(), [accumulate, compress], SLOW)
    assert "The link carries 0.1 Gbit/s, a small message takes 1 ms" in text
    assert "the exchange takes 4 × the compute" in text
    assert f"accumulate 8 (a global batch 8 times as large) for about {accumulate.gain:.2g} ×, or use fp16" in text


def test_compression_is_not_promised_where_latency_is_the_limit() -> None:
    assert [one.options for one in advise(measured(), [], 1.0)] == [("--accumulate", "8")]


def test_nothing_is_promised_where_nothing_is_lost() -> None:
    quick = measured(exchange=0.002, waiting=0.002)
    assert advise(quick, [], 0.5) == []
    assert "nothing that is known here would make it a tenth faster" in sentence(quick, [], None)
    assert advise(quick, [], 0.5, busy=0.2) == []
    hungry = sentence(measured(exchange=0.002, input=0.2), [], None)
    assert re.search(r"input takes 66% of a step", hungry)


def test_a_better_strategy_or_a_smaller_shape_is_named() -> None:
    others = [measured(strategy="ring", samples_per_s=1200.0), measured(shape="1x2", ranks=2, samples_per_s=1600.0)]
    words = [one.what for one in advise(measured(exchange=0.001), others, None)]
    assert words == ["stay with 1x2 (horovod)", "take strategy ring"]
    crowded = sentence(measured(threads=8), [], None)
    assert "8 threads share 4 cores, so that 50% is all there can be" in crowded


def timing(step: float, samples: int, **changes: Any) -> dict[str, Any]:
    values = {
        "world_size": 1, "hosts": ["a"], "machines": 1, "cores": 2, "threads": 1, "device": "cpu", "strategy": "Single",
        "gradient_bytes": SIZE, "samples_in_epoch": 60000, "steps": 10, "updates": 10, "samples": samples * 10,
        "seconds": step * 10, "input": 0.0, "compute": 0.1, "exchange": step - 0.1, "waiting": 0.0, "hidden": None,
        "window": 0.0, "own": [0.1], "ranks": [],
    }  # fmt: skip
    return {**values, **changes}


@pytest.fixture
def results() -> Results:
    alone = Run(shape=Shape(hosts=1, per_host=1), strategy="single", scaling="alone", round=1, batch=100)
    hosts = [Host(name="a", slots=2), Host(name="<b>", slots=2)]
    plan = Plan(hosts=hosts, script=["x.py"], batch_flag="-b", steps=10, timeout_s=9)
    made = Results(plan=plan, batch=100, command=["scripts/scaling_test.py", "--hosts", "a:2,<b>:2"])
    spreads = ((0.1, [0.05, 0.15]), (0.4, [0.0, 0.9]), (0.1, [0.05, 0.15]))
    made.alone[100, 1] = [
        replace(alone, round=number, timing=timing(step, 100, own=own)) for number, (step, own) in enumerate(spreads, 1)
    ]
    made.networks["horovod"] = Network(local=FAST, remote=SLOW)
    for number, step in enumerate((2.0, 2.2, 9.0), 1):
        run = Run(shape=FOUR, strategy="horovod", scaling="weak", round=number, batch=100)
        made.runs += [
            Run(shape=alone.shape, strategy="single", scaling="both", round=number, batch=100).ended(
                timing=timing(0.08, 100)
            ),
            run.ended(timing=timing(step, 400, threads=1)),
        ]
    return made


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
    assert four.predicted.waiting == pytest.approx(math.sqrt(2) * 0.025)  # of two, three in four times for the slow one
    assert re.search(r"\|\s+35\.4 \|", show(results))
    assert four.error == pytest.approx(four.predicted_samples_per_s / (400 / 2.2) - 1)
    assert one.predicted is None
    assert {guess.shape.ranks for _, guess, _ in results.larger()} == {8, 16, 64}


def test_a_rank_by_itself_is_measured_once_in_each_round(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_test, "_run_once", lambda run, *_: run.ended(problem="it fell over"))
    results.alone.clear()
    for number in (1, 1, 2):
        scaling_test._by_itself(results, number, 100, 1, tqdm(disable=True))
    assert [run.round for run in results.alone[100, 1]] == [1, 2]
    assert len([problem for problem in results.problems() if "it fell over" in problem]) == 2


def test_an_accumulated_step_has_its_part_of_an_exchange() -> None:
    rank = Rank(input=0, compute=0.1, window=0, gradient_bytes=4, accumulate=4)
    network = Network(remote=line(0.2, 0))
    assert predict(rank, PAIR, network, "ring").step == pytest.approx(0.1 + 0.2 / 4)


def test_promises_are_what_can_be_tried(results: Results) -> None:
    promises = list(results.promises())
    assert [run.options for run, _ in promises] == [("--accumulate", "8"), ("--compression", "fp16")]
    assert promises[0][1].base == pytest.approx(400 / 2.2)


def test_everything_is_in_table_json_picture_and_page(results: Results, tmp_path: Path) -> None:
    run, promise = next(results.promises())
    results.tried.append((run.ended(timing=timing(1.1, 400)), Promise(advice=promise.advice, base=promise.base)))
    results.runs.append(
        Run(shape=PAIR, strategy="ring", scaling="weak", round=1, batch=100).ended(problem="no <such> host")
    )
    results.tried.append((run.ended(problem="the wire broke"), promise))
    results.no_network = "no route"
    results.alone[50, 1] = []  # interrupted there
    results.interrupted = True
    write_json(tmp_path / "s.json", results)
    written = json.loads((tmp_path / "s.json").read_text())
    assert [row["measured"]["samples_per_s"] for row in written["rows"]] == pytest.approx([1250, 400 / 2.2])
    assert len(written["runs"]) == 7
    assert written["interrupted"] is True
    text = show(results)
    draw(tmp_path / "s.svg", results)
    write_page(tmp_path / "s.html", results)
    page, picture = (tmp_path / "s.html").read_text(), (tmp_path / "s.svg").read_text()
    for words in ("2x2 under horovod: efficiency 5%", "gave 2.00 ×", "Interrupted", "ring weak batch 100"):
        assert words in text
        assert words in page
    for words in ("the wire broke", "the network cannot be measured: no route"):
        assert words in text
        assert words in page
        assert any(words in problem for problem in written["problems"])
    for title, _, body in tables(results):
        assert title in page or not body
    assert "no <such> host" in text
    assert "no &lt;such&gt; host" in page
    assert "<b>:2" not in page
    assert "Throughput" in picture
    assert page.count("<svg") == 2
    # One file: nothing is fetched and nothing is run.
    assert not re.search(r"<(script|link|img|iframe)\b|url\(http|(src|href)=\"(?!#)", page)


def test_hosts_and_shapes() -> None:
    hosts = parse_hosts("a:2,b:2")
    assert [str(shape) for shape in parse_shapes(None, hosts)] == ["1x1", "1x2", "2x1", "2x2"]
    assert [str(shape) for shape in parse_shapes(None, parse_hosts("a:1"))] == ["1x1"]
    assert [str(shape) for shape in parse_shapes("2×2", hosts)] == ["1x1", "2x2"]
    for text in ("a", "a:0", "a:2,", "a:two"):
        with pytest.raises(TrainerError, match="valid is host:ranks"):
            parse_hosts(text)
    with pytest.raises(TrainerError, match="--shapes has 3x1, for which --hosts a:2,b:2 has no room"):
        parse_shapes("3x1", hosts)
    with pytest.raises(TrainerError, match="--shapes is '2by2'; valid is hosts x ranks on each"):
        parse_shapes("2by2", hosts)
