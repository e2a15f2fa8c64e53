"""Evaluation of scaling_test.py's runs: medians, speed-ups, predictions, advice, and trials of the advice."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from measuring import cpu_model
from scaling.advice import Advice, Known, Measured, advise, summarize
from scaling.baselines import Baselines, messages_of, ranks_at_once, steps_per_update
from scaling.jobs import Plan
from scaling.low_rank import LowRank
from scaling.models import (
    MODELS,
    Link,
    Network,
    Prediction,
    Rank,
    Shape,
    hides_exchange,
    is_network_bound,
    model_of,
    predict,
)
from scaling.runs import PHASES, Row, Run, Trial
from trainer.config import RunConfig

LARGER_RANKS = (8, 16, 64)
"""Numbers of ranks that are predicted, on more hosts of the same kind."""


@dataclass
class Results:
    """All results so far."""

    plan: Plan
    batch: int
    """Samples per rank and step on 1x1."""
    command: Sequence[str]
    baselines: Baselines = field(default_factory=Baselines)
    runs: list[Run] = field(default_factory=list)
    networks: dict[str, Network] = field(default_factory=dict)
    """By strategy."""
    beside_compute: dict[tuple[Shape, str, int], list[float]] = field(default_factory=dict)
    """Seconds of a step's computing and its exchange, one per round, by shape, strategy and batch; only of ranks on
    CPUs."""
    low_rank: LowRank | None = None
    """None where no shape has several ranks."""
    tried: list[tuple[Run, Trial]] = field(default_factory=list)
    no_network: str | None = None
    """Why the network could not be measured."""
    interrupted: bool = False

    def first(self) -> dict[str, Any]:
        """Return the timing of the first single rank."""
        return next(run.timing for run in self.baselines.single_rank_runs() if run.timing)

    def facts(self) -> dict[str, str]:
        """Describe the hosts, the device and the job."""
        timing = self.first()
        hosts = ", ".join(f"{host.name}: {host.slots}" for host in self.plan.hosts)
        seen = max((run.timing["machines"] for run in self.runs if run.timing), default=1)
        return {
            "hosts": f"{hosts}; on {seen} machine{'s' * (seen > 1)}",
            "device": f"{timing['device']}, {timing['cores']} cores a host ({cpu_model()}), Linux {platform.release()}",
            "gradients": f"{timing['gradient_bytes'] / 1e6:.3g} MB on each rank",
            "samples": f"{timing['samples_in_epoch']:,} per epoch; {timing['steps']} steps measured in each run",
            "command": " ".join(self.command),
        }

    def problems(self) -> list[str]:
        """Return one line for each failure."""
        baselines = [*self.baselines.single_rank_runs(), *self.baselines.side_by_side_runs()]
        runs = [*baselines, *self.runs, *(run for run, _ in self.tried)]
        failed = [f"{run}: {run.problem}" for run in runs if run.problem]
        return [*failed, f"the network cannot be measured: {self.no_network}"] if self.no_network else failed

    def rows(self) -> list[Row]:
        """Return a row for each shape, strategy and scaling, in the order of their first run."""
        keys = dict.fromkeys((run.shape, run.strategy, run.scaling) for run in self.runs if run.timing)
        base = [run.samples_per_s for run in self.runs if run.timing and run.shape.ranks == 1]
        return [self._row(key, statistics.median(base) if base else None) for key in keys]

    def network(self, strategy: str) -> Network:
        """Return the links measured with a strategy's transport."""
        return self.networks.get(strategy, Network())

    def computed_between(self, run: Run) -> float | None:
        """Return the seconds of a core between two exchanges that are measured beside computing; None where none is.

        The measurement computes with one thread, and then all-reduces: so it is for ranks with one thread each, and not
        where the backward pass hides a part of the exchange.
        """
        timing = run.timing
        if timing is None or timing["device"] != "cpu" or timing["threads"] > 1:
            return None
        kind = (run.batch, timing["threads"], ranks_at_once(timing))
        rank = self.baselines.rank(*kind)
        # In all rounds it is the computing of the same baseline.
        if rank is None or not self.baselines.is_measured(*kind):
            return None
        on_cpu = run.shape.ranks / (timing["cores"] * timing["machines"])
        if hides_exchange(self.network(run.strategy), rank, on_cpu):
            return None
        return (rank.input + rank.compute) * rank.accumulate

    def strategies(self) -> list[str]:
        """Return the strategies that have been run on several ranks."""
        return list(dict.fromkeys(run.strategy for run in self.runs if run.shape.ranks > 1))

    def larger(self) -> list[tuple[str, Prediction, float]]:
        """Predict larger numbers of ranks with each model.

        Returns:
            The strategy whose links the model uses, the prediction, and the efficiency, for each.
        """
        first, larger = self.first(), []
        alone = self.baselines.rank(self.batch, first["threads"])
        slots = min(host.slots for host in self.plan.hosts)
        if alone is None:
            return []
        # Links within a host do not predict links between hosts.
        measured = [name for name in self.strategies() if self.network(name).remote is not None]
        for model in MODELS if measured else ():
            four = Shape(hosts=2, per_host=2)
            fitting = [name for name in measured if model_of(name, alone.gradient_bytes, four) == model]
            strategy = (fitting or measured)[0]
            for ranks in LARGER_RANKS:
                per_host = max(count for count in range(1, min(slots, ranks) + 1) if ranks % count == 0)
                shape = Shape(hosts=ranks // per_host, per_host=per_host)
                at_once = ranks_at_once({**first, "world_size": per_host})
                rank = self.baselines.rank(self.batch, first["threads"], at_once) or alone
                threads_per_core = self._threads_per_core(1.0)
                predicted = predict(rank, shape, self.network(strategy), model, threads_per_core=threads_per_core)
                larger.append((strategy, predicted, (alone.input + alone.compute) / predicted.step))
        return larger

    def advice(self) -> list[tuple[Row, list[Advice], str]]:
        """Return the largest shape under each strategy, in weak scaling if measured, with its advice and a summary."""
        rows, advised = self.rows(), []
        for strategy in self.strategies():
            of_strategy = [row for row in rows if row.strategy == strategy]
            weak = [row for row in of_strategy if row.scaling == "weak"] or of_strategy
            if not weak:
                continue
            row = max(weak, key=lambda other: (other.shape.ranks, other.shape.hosts))
            others = [other.measured for other in rows if other is not row and other.scaling in (row.scaling, "both")]
            advice = advise(row.measured, others, self._known(row))
            advised.append((row, advice, summarize(row.measured, advice, self._slowest_link(row))))
        return advised

    def trials(self) -> Iterator[tuple[Run, Trial]]:
        """Yield a run for each advice that is an option of the script."""
        for row, advice, _ in self.advice():
            for item in advice:
                if item.options and item.options[0] != "--strategy":
                    run = Run(shape=row.shape, strategy=row.strategy, scaling=row.scaling, round=1, batch=row.batch)
                    yield replace(run, options=item.options), Trial(advice=item, base=row.measured.samples_per_s)

    def _row(self, key: tuple[Shape, str, str], base: float | None) -> Row:
        shape, strategy, scaling = key
        runs = [run for run in self.runs if (run.shape, run.strategy, run.scaling) == key and run.timing]
        timings = [run.timing for run in runs if run.timing]
        rates = [run.samples_per_s for run in runs]
        rate = statistics.median(rates)
        cores, threads = timings[0]["cores"] * timings[0]["machines"], timings[0]["threads"] * shape.ranks
        measured = Measured(
            shape=str(shape),
            strategy=strategy,
            ranks=shape.ranks,
            samples_per_s=rate,
            cores=cores,
            threads=threads,
            efficiency=self._efficiency(rate, shape, timings[0]["threads"]),
            gradient_bytes=timings[0]["gradient_bytes"],
            workers=timings[0]["workers"],
            on_cpu=timings[0]["device"] == "cpu",
            **_medians(timings),
        )
        batch = round(timings[0]["samples"] / timings[0]["steps"] / shape.ranks)
        rank = self.baselines.rank(runs[0].batch, timings[0]["threads"], ranks_at_once(timings[0]))
        predicted = self._predict(rank, shape, strategy, threads / cores, runs[0].batch)
        return Row(
            shape=shape,
            strategy=strategy,
            scaling=scaling,
            batch=batch,
            runs=len(runs),
            measured=measured,
            least=min(rates),
            most=max(rates),
            epoch_s=timings[0]["samples_in_epoch"] / rate,
            accumulate=steps_per_update(timings[0]),
            speedup=rate / base if base else None,
            predicted=predicted,
            predicted_samples_per_s=batch * shape.ranks / predicted.step if predicted else None,
        )

    def _predict(
        self, rank: Rank | None, shape: Shape, strategy: str, threads_per_core: float, batch: int
    ) -> Prediction | None:
        network = self.network(strategy)
        if rank is None or shape.ranks == 1 or (network.local is None and network.remote is None):
            return None
        model = model_of(strategy, rank.gradient_bytes, shape)
        beside = self.beside_compute.get((shape, strategy, batch))
        return predict(
            rank,
            shape,
            network,
            model,
            threads_per_core=self._threads_per_core(threads_per_core),
            together=statistics.median(beside) / rank.accumulate if beside else None,
        )

    def _threads_per_core(self, on_cpu: float) -> float:
        """Return the computing threads per core; 0 where GPUs compute, which leaves the cores to the exchange."""
        return on_cpu if self.first()["device"] == "cpu" else 0.0

    def _efficiency(self, rate: float, shape: Shape, threads: int) -> float | None:
        """Return samples/s relative to as many single ranks, each with the whole batch and the same threads."""
        if shape.ranks == 1:
            return 1.0
        alone = [run.samples_per_s for run in self.baselines.alone.get((self.batch, threads), ()) if run.timing]
        return rate / (shape.ranks * statistics.median(alone)) if alone else None

    def _known(self, row: Row) -> Known:
        """Return what the advice for a shape takes beside its measurement."""
        own = Known(accumulate=round(row.accumulate), config=RunConfig(**self.first().get("settings", {})))
        if row.predicted is None:
            return own
        size, low_rank_s = row.measured.gradient_bytes, None
        half, whole = (self._exchange_s(row, part) for part in (size / 2, size))
        half_size_ratio = None if self._is_core_bound(row) else half / whole
        if self.low_rank is not None:
            slowdown = max(1.0, self._threads_per_core(row.measured.threads / row.measured.cores))
            low_rank_s = self.low_rank.seconds * slowdown
            low_rank_s += sum(self._exchange_s(row, part, slowdown) for part in self.low_rank.messages)
            low_rank_s /= row.accumulate
        full_load_s = row.predicted.compute
        return replace(own, half_size_ratio=half_size_ratio, low_rank_s=low_rank_s, full_load_s=full_load_s)

    def _is_core_bound(self, row: Row) -> bool:
        """Return whether cores are known to limit the exchange. They then lose by rounding what they send."""
        network = self.network(row.strategy)
        across = network.local is None or is_network_bound(network, row.measured.gradient_bytes)
        return self.first()["device"] == "cpu" and (row.shape.hosts == 1 or not across)

    def _exchange_s(self, row: Row, size: float, slowdown: float = 1.0) -> float:
        """Return the predicted seconds of an exchange of so many bytes on a row's shape."""
        network = self.network(row.strategy).loaded(size, slowdown)
        return MODELS[model_of(row.strategy, size, row.shape)](size, row.shape, network)

    def _slowest_link(self, row: Row) -> Link | None:
        network = self.network(row.strategy)
        across = network.one_way if row.shape.ranks > 2 and network.one_way else network.remote
        return across if row.shape.hosts > 1 else network.local


def _medians(timings: Sequence[dict[str, Any]]) -> dict[str, float]:
    medians = {name: statistics.median(timing[name] for timing in timings) for name in PHASES}
    seen = [timing["hidden"] for timing in timings if timing["hidden"] is not None]
    # Horovod does not report overlap. With several messages and a long exchange, assume that it fills the window.
    fills = messages_of(timings[0]) > 1 and medians["exchange"] > 0.1 * medians["compute"]
    window = statistics.median(timing["window"] for timing in timings) / steps_per_update(timings[0])
    assumed = window if fills else 0.0
    return {**medians, "hidden": statistics.median(seen) if seen else assumed}
