"""Results of the benchmark: medians, paired ratios, the limit, and whether the targets are met."""

from __future__ import annotations

import pytest

from benchmarks import results, tables
from benchmarks.overhead import Overhead
from benchmarks.workloads import TRANSFORMER
from tests.unit.benchmark_runs import make_rounds, make_run


def overhead(median_us: float) -> Overhead:
    return Overhead(ranks=1, median_us=median_us, low_us=1, high_us=30, ours_us=200, by_hand_us=190, pairs=10, steps=50)


def test_the_first_epoch_is_discarded() -> None:
    assert results.epoch_seconds(make_run("ours", 1, 0, 4.0, 2.0, 3.0)) == 3.0


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was four times slower in round 1, for both: the ratio of the medians would be 3.5.
    runs = make_rounds(ours_2=[2.0, 8.0, 2.0], plain_2=[6.0, 24.0, 7.0])
    assert results.paired_ratios(runs, ("plain", 2), ("ours", 2)) == [3.0, 3.0, 3.5]


def test_a_round_without_its_pair_does_not_count() -> None:
    runs = [make_run("ours", 2, 0, 2.0, problem="killed after 300 s"), make_run("ddp", 2, 0, 8.0)]
    assert results.paired_ratios(runs, ("ddp", 2), ("ours", 2)) == []
    runs += [make_run("ours", 2, 1, 2.0), make_run("ddp", 2, 1, 3.0)]
    assert results.paired_ratios(runs, ("ddp", 2), ("ours", 2)) == [1.5]


def test_a_spread_holds_median_and_quartiles() -> None:
    assert results.spread([]) is None
    assert results.spread([4.0, 2.0]) == results.Spread(median=3.0, low=2.0, high=4.0, rounds=2)
    assert results.spread([4.0, 2.0, 3.0]) == results.Spread(median=3.0, low=2.0, high=4.0, rounds=3)
    assert results.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == results.Spread(median=3.0, low=1.5, high=4.5, rounds=5)


def test_a_row_holds_median_range_rate_and_distance_to_the_limit() -> None:
    runs = make_rounds(ours_2=[5.0, 4.0, 10.0], limit_2=[4.0, 3.6, 9.5])
    ours, limit = results.make_rows(runs)
    assert (ours.median_s, ours.least_s, ours.most_s, ours.per_s, ours.times_ours) == (5, 4, 10, 12000, 1)
    assert ours.percent_of_limit == results.Spread(median=90.0, low=80.0, high=95.0, rounds=3)
    assert limit.percent_of_limit == results.Spread(median=100.0, low=100.0, high=100.0, rounds=3)
    table = tables.render_rows([ours], "images/s").splitlines()
    assert len({len(line) for line in table}) == 1
    assert table[2].split()[-7:] == ["2", "5.00", "4.00-10.00", "12,000", "90.0", "80.0-95.0", "1.00"]


def test_a_networks_rows_have_its_contestants_and_its_throughput() -> None:
    runs = [make_run(name, 1, 0, 4.0, network=TRANSFORMER) for name in ("ours", "fabric")]
    rows = results.make_rows(runs)
    assert [row.title for row in rows] == ["loop on the trainer's handle (ours)", "Lightning Fabric, ddp"]
    assert {row.per_s for row in rows} == {320 * 128 / 4}
    runs = [make_run(name, 2, 0, seconds, network=TRANSFORMER) for name, seconds in (("ddp", 2.0), ("fabric", 2.4))]
    (fact,) = results.make_facts(runs, [])
    assert fact.value == pytest.approx(10_000)  # µs a step: 0.4 s in 40 steps
    assert results.make_facts([make_run("ours", 1, 0, 4.0, network=TRANSFORMER)], [overhead(15.0)]) == []


def test_without_the_limit_a_row_has_no_distance_to_it() -> None:
    (row,) = results.make_rows(make_rounds(ours_2=[5.0]))
    assert row.percent_of_limit is None
    assert tables.render_rows([row], "images/s").splitlines()[2].split()[-2:] == ["12,000", "1.00"]


def test_the_limit_is_that_of_ranks_side_by_side() -> None:
    runs = make_rounds(limit_1=[6.0, 8.0, 7.0], limit_2=[4.0, 5.0, 3.5], ours_2=[4.0, 5.0, 4.0])
    (limit,) = results.make_limits(runs)
    assert (limit.ranks, limit.side_by_side_s, limit.alone_s) == (2, 4.0, 3.5)
    assert limit.alone_percent == results.Spread(median=80.0, low=75.0, high=100.0, rounds=3)
    text = tables.render_limit(limit)
    assert text.startswith("limit on 2 ranks: 4.00 s/epoch, 2 ranks side by side without exchange")
    assert "one rank alone / 2: 3.50 s/epoch, 80.0 % of that" in text
    assert results.make_limits(make_rounds(ours_2=[4.0], limit_1=[6.0])) == []


@pytest.mark.parametrize(
    ("ours", "cores", "met", "verdict"),
    [
        ([4.0, 4.0, 4.0], 2, True, "met"),  # 95 %
        ([4.0, 4.1, 4.1], 2, False, "MISSED"),
        ([4.1, 4.1, 4.1], 1, None, "not judged: 2 ranks share 1 core"),
        ([4.0, 4.0], 2, None, "not judged: fewer than 3 rounds"),
    ],
)
def test_ours_is_to_reach_95_percent_of_the_limit(
    ours: list[float], cores: int, met: bool | None, verdict: str
) -> None:
    runs = make_rounds(limit_2=[3.8] * 3, ours_2=ours)
    (target,) = results.make_targets(runs, [], cores)
    assert target.met is met
    line = tables.render_targets([target]).splitlines()[0]
    assert "wanted: ≥ 95 %" in line
    assert line.endswith(f")  {verdict}")


@pytest.mark.parametrize(
    ("ours", "met", "verdict"),
    [
        ([9.0, 10.0, 10.0], True, "met"),
        ([10.1, 10.2, 9.9], True, "met within the noise"),  # one of three rounds disagrees
        ([10.1, 10.2, 10.1], False, "MISSED"),
        ([9.8, 10.2, 10.2, 10.1, 10.1], True, "met within the noise"),  # quartiles of the ratios: 0.995 to 1.02
        ([9.99, 10.2, 10.2, 10.1, 10.1], False, "MISSED"),  # 1.0045 to 1.02
        ([10.1, 10.2], None, "not judged: fewer than 3 rounds"),
    ],
)
def test_ours_is_behind_a_peer_only_beyond_the_noise(ours: list[float], met: bool | None, verdict: str) -> None:
    runs = make_rounds(ours_2=ours, ddp_2=[10.0] * len(ours))
    (target,) = results.make_targets(runs, [], cores=2)
    assert target.met is met
    lines = tables.render_targets([target]).splitlines()
    assert lines[0].startswith("2 ranks: not behind hand-written DDP loop, Gloo")
    assert lines[0].endswith(f"wanted: ≤ 1×)  {verdict}")
    assert "behind a peer when the whole interquartile range" in lines[1]


def test_each_number_of_ranks_is_compared_with_its_own_limit_and_peers() -> None:
    runs = make_rounds(limit_4=[1.0] * 3, ours_4=[1.25] * 3, ours_1=[4.0] * 3, ddp_4=[1.5] * 3)
    targets = results.make_targets(runs, [], cores=4)
    assert [(target.text, round(target.value, 3), target.met) for target in targets] == [
        ("4 ranks: ours, of the limit", 80.0, False),
        ("4 ranks: not behind hand-written DDP loop, Gloo", 0.833, True),
    ]
    assert results.make_targets(runs, [], cores=2)[0].reason == "4 ranks share 2 cores"
    facts = {fact.text: fact.value for fact in results.make_facts(runs, [])}
    assert facts["4 ranks: DDP loop / ours, seconds"] == pytest.approx(1.2)
    assert facts["4 ranks / 1 rank on 1 core, ours, throughput"] == pytest.approx(3.2)


def test_the_cost_of_our_layer_has_a_target_on_one_rank() -> None:
    two_ranks = Overhead(**{**vars(overhead(15.0)), "ranks": 2})
    targets = results.make_targets([], [overhead(20.0), overhead(20.1), two_ranks], cores=2)
    assert [(target.value, target.met) for target in targets] == [(20.0, True), (20.1, False)]


def test_old_ratios_are_information() -> None:
    runs = make_rounds(ours_1=[6.0], ours_2=[3.0], ddp_2=[3.3])
    facts = results.make_facts(runs, [overhead(15.0)])
    assert [(round(fact.value, 3), fact.unit) for fact in facts] == [(1.1, "×"), (2.0, "×"), (0.15, " %")]
    assert tables.render_facts([]) == ""
    assert tables.render_facts(facts).startswith("For information:\n2 ranks: DDP loop / ours, seconds")


def test_what_a_library_costs_beside_ddp_is_information() -> None:
    runs = make_rounds(ddp_2=[3.0, 3.0, 4.0], fabric_2=[3.03, 3.06, 4.09], ddp_1=[4.0], accelerate_1=[5.0])
    (fact,) = results.make_facts(runs, [])  # one rank is left out
    assert fact.text == "2 ranks: Lightning Fabric, ddp beside the DDP loop, per step"
    assert (round(fact.value, 6), fact.unit) == (200.0, " µs")  # 0.06 s in 300 steps
