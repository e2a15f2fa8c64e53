"""What scaling_test.py has measured, put together: medians, speed-ups, predictions, advice and what it promises."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scaling.advice import Advice, Measured, advise, sentence
from scaling.jobs import Plan
from scaling.models import MODELS, Link, Network, Prediction, Rank, Shape, model_of, predict
from trainer.strategies.bucketed import BUCKET_BYTES
from trainer.tuning.host import cpu_model

LARGER = (8, 16, 64)
"""Ranks for which everything is predicted, on hosts like these."""
_PHASES = ("input", "compute", "exchange", "waiting")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job: what it is, and how it ended."""

    shape: Shape
    strategy: str
    scaling: str
    """weak or strong; both for a rank by itself, alone for one with no more than its share of the cores."""
    round: int
    batch: int
    """Samples per rank and step."""
    options: tuple[str, ...] = ()
    timing: dict[str, Any] | None = None
    problem: str | None = None

    def ended(self, *, timing: dict[str, Any] | None = None, problem: str | None = None) -> Run:
        return replace(self, timing=timing, problem=problem)

    @property
    def samples_per_s(self) -> float:
        return float(self.timing["samples"] / self.timing["seconds"]) if self.timing else 0.0

    def __str__(self) -> str:
        words = [str(self.shape), self.strategy, self.scaling, f"batch {self.batch}", *self.options]
        return f"{' '.join(words)}, round {self.round}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A shape under one strategy, over all rounds: medians."""

    shape: Shape
    strategy: str
    scaling: str
    batch: int
    runs: int
    least: float
    """samples/s of the slowest run."""
    most: float
    epoch_s: float
    speedup: float | None
    """Over one rank by itself, as it comes; None where that was not measured."""
    measured: Measured
    predicted: Prediction | None
    predicted_samples_per_s: float | None

    @property
    def error(self) -> float | None:
        """Of the predicted samples/s, as a part of the measured ones."""
        if self.predicted_samples_per_s is None:
            return None
        return self.predicted_samples_per_s / self.measured.samples_per_s - 1


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Advice, and the samples/s that it starts from."""

    advice: Advice
    base: float


@dataclass
class Results:
    """Everything of one sitting, as far as it has come."""

    plan: Plan
    batch: int
    command: Sequence[str]
    alone: dict[tuple[int, int], list[Run]] = field(default_factory=dict)
    """One rank by itself in each round, by batch and PyTorch threads."""
    runs: list[Run] = field(default_factory=list)
    networks: dict[str, Network] = field(default_factory=dict)
    """By strategy."""
    tried: list[tuple[Run, Promise]] = field(default_factory=list)
    no_network: str | None = None
    """Why it could not be measured."""
    interrupted: bool = False

    def first(self) -> dict[str, Any]:
        """What the first rank by itself said."""
        return next(run.timing for run in self.lone_runs() if run.timing)

    def lone_runs(self) -> list[Run]:
        """All of one rank by itself."""
        return [run for runs in self.alone.values() for run in runs]

    def facts(self) -> dict[str, str]:
        """Where this was measured."""
        timing = self.first()
        hosts = ", ".join(f"{host.name}: {host.slots}" for host in self.plan.hosts)
        seen = max((run.timing["machines"] for run in self.runs if run.timing), default=1)
        return {
            "hosts": f"{hosts}; {seen} machine{'s' * (seen > 1)} underneath",
            "device": f"{timing['device']}, {timing['cores']} cores a host ({cpu_model()}), Linux {platform.release()}",
            "gradients": f"{timing['gradient_bytes'] / 1e6:.3g} MB on each rank",
            "samples": f"{timing['samples_in_epoch']:,} an epoch; {timing['steps']} steps measured in each run",
            "command": " ".join(self.command),
        }

    def problems(self) -> list[str]:
        """What failed, a line each."""
        runs = [*self.lone_runs(), *self.runs, *(run for run, _ in self.tried)]
        failed = [f"{run}: {run.problem}" for run in runs if run.problem]
        return [*failed, f"the network cannot be measured: {self.no_network}"] if self.no_network else failed

    def rows(self) -> list[Row]:
        """In the order in which they were first measured."""
        keys = dict.fromkeys((run.shape, run.strategy, run.scaling) for run in self.runs if run.timing)
        base = [run.samples_per_s for run in self.runs if run.timing and run.shape.ranks == 1]
        return [self._row(key, statistics.median(base) if base else None) for key in keys]

    def network(self, strategy: str) -> Network:
        return self.networks.get(strategy, Network())

    def strategies(self) -> list[str]:
        return list(dict.fromkeys(run.strategy for run in self.runs if run.shape.ranks > 1))

    def larger(self) -> list[tuple[str, Prediction, float]]:
        """For each model and each larger number of ranks: strategy measured over, prediction, efficiency."""
        rank, found = self._rank(self.batch, self.first()["threads"]), []
        room = min(host.slots for host in self.plan.hosts)
        if rank is None:
            return []
        # What one host does says nothing about others.
        measured = [name for name in self.strategies() if self.network(name).remote is not None]
        for model in MODELS if measured else ():
            four = Shape(hosts=2, per_host=2)
            fitting = [name for name in measured if model_of(name, rank.gradient_bytes, four) == model]
            strategy = (fitting or measured)[0]
            for ranks in LARGER:
                per_host = max(count for count in range(1, min(room, ranks) + 1) if ranks % count == 0)
                shape = Shape(hosts=ranks // per_host, per_host=per_host)
                guess = predict(rank, shape, self.network(strategy), model, crowd=0.0 if self._on_gpu() else 1.0)
                found.append((strategy, guess, (rank.input + rank.compute) / guess.step))
        return found

    def advice(self) -> list[tuple[Row, list[Advice], str]]:
        """For the largest shape under each strategy, weakly scaled where that was measured."""
        rows, found = self.rows(), []
        for strategy in self.strategies():
            own = [row for row in rows if row.strategy == strategy]
            weak = [row for row in own if row.scaling == "weak"] or own
            if not weak:
                continue
            row = max(weak, key=lambda one: (one.shape.ranks, one.shape.hosts))
            others = [one.measured for one in rows if one is not row and one.scaling in (row.scaling, "both")]
            link = self._slowest_link(row)
            busy = row.predicted.compute if row.predicted else 0.0
            advice = advise(row.measured, others, self._halved(row), busy)
            found.append((row, advice, sentence(row.measured, advice, link)))
        return found

    def promises(self) -> Iterator[tuple[Run, Promise]]:
        """What can be tried with an option, as runs."""
        for row, advice, _ in self.advice():
            for one in advice:
                if one.options and one.options[0] != "--strategy":
                    run = Run(shape=row.shape, strategy=row.strategy, scaling=row.scaling, round=1, batch=row.batch)
                    yield replace(run, options=one.options), Promise(advice=one, base=row.measured.samples_per_s)

    def _row(self, key: tuple[Shape, str, str], base: float | None) -> Row:
        shape, strategy, scaling = key
        runs = [run for run in self.runs if (run.shape, run.strategy, run.scaling) == key and run.timing]
        timings = [run.timing for run in runs if run.timing]
        rates = [run.samples_per_s for run in runs]
        rate = statistics.median(rates)
        cores, threads = timings[0]["cores"] * timings[0]["machines"], timings[0]["threads"] * shape.ranks
        measured = Measured(
            shape=str(shape), strategy=strategy, ranks=shape.ranks, samples_per_s=rate, cores=cores, threads=threads,
            efficiency=self._efficiency(rate, shape, timings[0]["threads"]),
            gradient_bytes=timings[0]["gradient_bytes"], **_medians(timings),
        )  # fmt: skip
        batch = round(timings[0]["samples"] / timings[0]["steps"] / shape.ranks)
        rank = self._rank(runs[0].batch, timings[0]["threads"])
        predicted = self._predict(rank, shape, strategy, threads / cores)
        return Row(
            shape=shape, strategy=strategy, scaling=scaling, batch=batch, runs=len(runs), measured=measured,
            least=min(rates), most=max(rates), epoch_s=timings[0]["samples_in_epoch"] / rate,
            speedup=rate / base if base else None, predicted=predicted,
            predicted_samples_per_s=batch * shape.ranks / predicted.step if predicted else None,
        )  # fmt: skip

    def _predict(self, rank: Rank | None, shape: Shape, strategy: str, crowd: float) -> Prediction | None:
        network = self.network(strategy)
        if rank is None or shape.ranks == 1 or (network.local is None and network.remote is None):
            return None
        model = model_of(strategy, rank.gradient_bytes, shape)
        return predict(rank, shape, network, model, crowd=0.0 if self._on_gpu() else crowd)

    def _on_gpu(self) -> bool:
        """Whether the cores are free for the exchange."""
        return bool(self.first()["device"] != "cpu")

    def _efficiency(self, rate: float, shape: Shape, threads: int) -> float | None:
        """Of as many ranks by themselves, each with the whole batch and as many threads as it has here."""
        if shape.ranks == 1:
            return 1.0
        alone = [run.samples_per_s for run in self.alone.get((self.batch, threads), ()) if run.timing]
        return rate / (shape.ranks * statistics.median(alone)) if alone else None

    def _rank(self, batch: int, threads: int) -> Rank | None:
        timings = [run.timing for run in self.alone.get((batch, threads), ()) if run.timing]
        if not timings:
            return None
        # Not strict: a round of fewer than a hundred updates has fewer groups, should a script's rounds differ.
        rounds = zip(*(timing["own"] for timing in timings), strict=False)
        found = {name: statistics.median(timing[name] for timing in timings) for name in (*_PHASES, "window")}
        return Rank(
            input=found["input"], compute=found["compute"] + found["exchange"], window=found["window"],
            gradient_bytes=timings[0]["gradient_bytes"],
            own=tuple(map(statistics.median, rounds)),
            accumulate=timings[0]["steps"] / max(1, timings[0]["updates"]),
        )  # fmt: skip

    def _halved(self, row: Row) -> float | None:
        if row.predicted is None:
            return None
        size, network = row.measured.gradient_bytes, self.network(row.strategy)
        half, whole = (
            MODELS[model_of(row.strategy, part, row.shape)](part, row.shape, network) for part in (size / 2, size)
        )
        return half / whole

    def _slowest_link(self, row: Row) -> Link | None:
        network = self.network(row.strategy)
        across = network.one_way if row.shape.ranks > 2 and network.one_way else network.remote
        return across if row.shape.hosts > 1 else network.local


def _medians(timings: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = {name: statistics.median(timing[name] for timing in timings) for name in _PHASES}
    seen = [timing["hidden"] for timing in timings if timing["hidden"] is not None]
    # Horovod does not say. Where several messages travel, and the last one is waited for, the others had the window.
    whole = timings[0]["gradient_bytes"] > BUCKET_BYTES and found["exchange"] > 0.1 * found["compute"]
    guess = statistics.median(timing["window"] for timing in timings) if whole else 0.0
    return {**found, "hidden": statistics.median(seen) if seen else guess}
