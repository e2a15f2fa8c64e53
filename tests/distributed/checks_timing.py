"""What a timed strategy finds on ranks whose delays are known; for two ranks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from scaling.timed_strategy import timed

from tests.distributed.job_that_is_timed import train
from trainer.strategies.base import Strategy
from trainer.strategies.horovod import HorovodStrategy

SLOW_S, INPUT_S = 0.03, 0.01


def time_training(strategy: Strategy, *, exchanges: bool = True) -> dict[str, Any]:
    """Train 20 steps, in which rank 1 is slow, and return what rank 0 wrote."""
    kind = type(strategy)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(strategy.broadcast_object(folder), "timing.jsonl")
        try:
            train(timed(strategy, file, steps=20, exchanges=exchanges), SLOW_S, INPUT_S)
        finally:
            strategy.__class__ = kind  # the checks of a job share it
        strategy.barrier()  # rank 0 has written
        (timing,) = map(json.loads, file.read_text().splitlines())
        strategy.barrier()  # all ranks have read
    return dict(timing)


def check_known_delays_are_found_where_they_are(strategy: Strategy) -> None:
    timing = time_training(strategy)
    assert (timing["world_size"], timing["steps"], timing["updates"], timing["samples"]) == (2, 20, 20, 400)
    assert timing["samples_in_epoch"] == 4000
    assert timing["gradient_bytes"] == (8 * 4 + 4) * 4
    assert timing["input"] >= INPUT_S
    quick, slow = timing["ranks"]
    assert quick["blocked"] - slow["blocked"] > 0.8 * SLOW_S
    assert slow["compute"] - quick["compute"] > 0.8 * SLOW_S
    assert timing["waiting"] == pytest.approx((quick["blocked"] + slow["blocked"]) / 2 - timing["exchange"])
    assert timing["waiting"] > 0.4 * SLOW_S
    # Horovod's own threads exchange; it does not tell how long they take.
    assert (timing["hidden"] is None) == isinstance(strategy, HorovodStrategy)


def check_ranks_that_exchange_nothing_wait_for_nobody(strategy: Strategy) -> None:
    timing = time_training(strategy, exchanges=False)
    quick, slow = timing["ranks"]
    assert slow["compute"] - quick["compute"] > 0.8 * SLOW_S
    assert quick["blocked"] < 0.2 * SLOW_S
