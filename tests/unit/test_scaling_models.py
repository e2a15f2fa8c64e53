"""The scaling test's performance models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scaling.models import MODELS, Link, Network, Rank, Shape, hierarchical, model_of, parameter_server, predict, ring


def linear_link(latency_s: float, s_per_byte: float) -> Link:
    return Link(((0, latency_s), (10**9, latency_s + 10**9 * s_per_byte)))


SLOW, FAST = linear_link(1e-3, 8e-8), linear_link(1e-5, 1e-10)  # 100 Mbit/s, 80 Gbit/s
PAIR, FOUR = Shape(hosts=2, per_host=1), Shape(hosts=2, per_host=2)
SIZE = 25_000_000


def test_a_link_interpolates_and_extrapolates_its_measurements() -> None:
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
def test_two_ranks_take_the_measured_time(model: str) -> None:
    network = Network(local=FAST, remote=SLOW)
    assert MODELS[model](SIZE, PAIR, network) == pytest.approx(SLOW.seconds(SIZE))
    if model != "parameter server":
        assert MODELS[model](SIZE, Shape(hosts=1, per_host=2), network) == pytest.approx(FAST.seconds(SIZE))


def test_models_count_the_bytes_on_the_slow_link() -> None:
    network = Network(local=linear_link(0, 0), remote=linear_link(0, 1))
    assert ring(1, FOUR, network) == pytest.approx(2 * 3 / 4)
    assert hierarchical(1, FOUR, network) == pytest.approx(2 * 1 / 2)
    assert parameter_server(1, FOUR, network) == 2  # K for each rank on the other host
    assert parameter_server(1, Shape(hosts=8, per_host=2), network) == 14
    assert ring(1, Shape(hosts=32, per_host=2), network) == pytest.approx(2 * 63 / 64)


def test_rings_of_more_than_two_ranks_use_the_one_way_link() -> None:
    network = Network(local=FAST, remote=SLOW, one_way=linear_link(1e-3, 4e-8))
    assert ring(SIZE, FOUR, network) == pytest.approx(3 * network.one_way.seconds(SIZE / 2))  # type: ignore[union-attr]
    assert ring(SIZE, PAIR, network) == pytest.approx(SLOW.seconds(SIZE))
    assert MODELS["tree"](SIZE, PAIR, network) == pytest.approx(SLOW.seconds(SIZE))


def test_horovods_model_follows_mpis_rules() -> None:
    assert model_of("horovod", SIZE, FOUR) == "ring"
    assert [model_of("horovod", size, FOUR) for size in (2**20 - 4, 2**20)] == ["tree", "ring"]
    assert [model_of("horovod", size, Shape(hosts=3, per_host=2)) for size in (2**21 - 4, 2**21)] == ["tree", "ring"]
    assert model_of("horovod", SIZE, PAIR) == model_of("horovod", SIZE, Shape(hosts=1, per_host=4)) == "tree"


def test_a_step_is_compute_and_the_exposed_exchange() -> None:
    rank = Rank(input=0.001, compute=0.049, window=0.02, gradient_bytes=SIZE, messages=6)
    network = Network(local=FAST, remote=SLOW)
    predicted = predict(rank, FOUR, network, "ring")
    assert predicted.exchange == pytest.approx(ring(SIZE, FOUR, network))
    assert predicted.step == pytest.approx(0.05 + predicted.exchange - 0.02)
    oversubscribed = predict(rank, FOUR, network, "ring", threads_per_core=2)
    assert oversubscribed.compute == pytest.approx(0.1)
    assert oversubscribed.exchange == predicted.exchange  # the slow link is the bottleneck, not the cores
    core_bound = Network(local=FAST, remote=FAST)
    assert predict(rank, FOUR, core_bound, "ring", threads_per_core=2).exchange == pytest.approx(
        2 * predict(rank, FOUR, core_bound, "ring").exchange
    )
    assert predict(rank, Shape(hosts=1, per_host=1), network, "ring").exposed == 0
    assert predict(replace(rank, messages=1), FOUR, network, "ring").exposed == predicted.exchange  # sent at the end
    assert predict(replace(rank, accumulate=4), FOUR, network, "ring").exchange == predicted.exchange / 4
