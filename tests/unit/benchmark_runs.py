"""Runs of the benchmark with given seconds, for its tests."""

from __future__ import annotations

from benchmarks.common import Report
from benchmarks.contestants import Run
from benchmarks.workloads import TUTORIAL

GOOD = Report(seconds=[9.0, 4.0], losses=[1.0, 0.5], samples=[60000, 60000], score=0.95, evaluated=10000)


def report(**changes: object) -> Report:
    return Report(**{**vars(GOOD), **changes})


def make_run(
    contestant: str, ranks: int, round: int, *epochs_s: float, problem: str | None = None, network: str = TUTORIAL
) -> Run:
    return Run(
        network=network,
        contestant=contestant,
        ranks=ranks,
        round=round,
        command=[],
        report=report(seconds=[99.0, *epochs_s]),
        problem=problem,
    )


def make_rounds(**seconds: list[float]) -> list[Run]:
    """Runs of `contestant_ranks=[seconds of each round]`."""
    return [
        make_run(key[:-2], int(key[-1]), number, value)
        for key, values in seconds.items()
        for number, value in enumerate(values)
    ]
