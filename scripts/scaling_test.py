"""Measure how a training script scales over hosts and ranks, where the time goes, and what to change.

    python scripts/scaling_test.py                                  # on this host: 1x1 and 1x2
    python scripts/scaling_test.py --hosts a:2,b:2                  # on two hosts, from a
    python scripts/scaling_test.py --hosts a:2,b:2 --strategies horovod,ddp,ring,parameter_server
    python scripts/scaling_test.py --hosts a:2,b:2 my_training.py --epochs 1
    python scripts/scaling_test.py --batch-size 32 --global-batch examples/language_model.py --bytes 4000000

Any script that trains through Trainer or trainer.init can be measured; its own arguments follow its name. Every
shape (hosts x ranks on each) runs several times, interleaved with the others. Weak scaling keeps the samples per rank
and step, so the global batch grows. Strong scaling keeps the global batch. Each step is divided into phases
(scripts/timed.py), and the network is measured with scripts/comm_bench.py. All shapes are predicted: on GPUs from a
single rank and the network, on CPUs from ranks of one machine that compute side by side and, where nothing hides it, an
exchange beside computing. The predictions are compared with the measurement. The results are scaling.json, scaling.svg,
and scaling.html, a page with everything. After an interruption they contain the runs until then.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from scaling.baselines import ranks_at_once
from scaling.jobs import JobError, Plan, time_beside_compute, time_network, time_steps
from scaling.low_rank import measure_low_rank
from scaling.models import Shape
from scaling.options import parse_args
from scaling.report import draw, render_text, write_json, write_page
from scaling.results import Results
from scaling.runs import Run

from measuring import INTERRUPTS, interrupt_on
from trainer.errors import TrainerError
from trainer.tuning.host import host_cores
from trainer.watch.failure import report_failures

_SINGLE = Shape(hosts=1, per_host=1)


def main() -> int:
    report_failures()
    options = parse_args(__doc__)
    interrupt_on(*INTERRUPTS)
    _make_folder(options.output)
    results = Results(plan=options.plan, batch=options.batch_size, command=sys.argv)
    planned = list(_planned_runs(options))
    code = 0
    try:
        _measure(results, planned, options)
    except KeyboardInterrupt:
        results.interrupted, code = True, 130
        for number in INTERRUPTS:  # a second Ctrl-C must not prevent the results from being written
            signal.signal(number, signal.SIG_IGN)
        _print_line(f"interrupted after {len(results.runs)} of {len(planned)} runs; their results follow")
    if any(run.timing for run in results.runs):
        _write_results(results, options.output)
    return code or int(bool(results.problems()))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainerError(f"--output {folder} cannot be written: {error.strerror or error}") from None


def _measure(results: Results, planned: Sequence[Run], options: argparse.Namespace) -> None:
    """Measure a single rank, the network, then all planned runs and, with --try-advice, the advice."""
    file = options.output / "scaling.json"
    share = max(1, host_cores() // max(shape.per_host for shape in options.shapes))
    first = _measure_single_rank(results, 1, options.batch_size, share)
    if first.timing is None:
        raise TrainerError(f"one rank by itself cannot be measured: {first.problem}")
    write_json(file, results)
    if any(shape != _SINGLE for shape in options.shapes):
        _measure_network(results, first.timing, options.strategies)
        results.low_rank = measure_low_rank(*(first.timing[name] for name in ("gradient_shapes", "threads", "device")))
    for number, run in enumerate(planned, 1):
        _measure_single_rank(results, run.round, options.batch_size, share)
        done = _run_once(run, results.plan)
        results.runs.append(done)
        _report_run(done, f"[{number}/{len(planned)}] ")
        if done.timing is not None and done.shape != _SINGLE:
            # The efficiency compares with a single rank that has the same number of threads.
            for batch in dict.fromkeys((done.batch, options.batch_size)):
                _measure_single_rank(results, done.round, batch, done.timing["threads"])
                _measure_side_by_side(results, replace(done, batch=batch), done.timing)
            _measure_beside_compute(results, done)
        write_json(file, results)
    for run, trial in results.trials() if options.try_advice else ():
        tried = _run_once(run, results.plan)
        results.tried.append((tried, trial))
        _report_run(tried)
        write_json(file, results)


def _measure_network(results: Results, timing: dict[str, Any], strategies: Sequence[str]) -> None:
    try:
        results.networks = time_network(results.plan, strategies, timing["gradient_bytes"], timing["device"])
    except JobError as error:
        results.no_network = str(error)
        _print_line(f"the network cannot be measured: {error}")


def _measure_side_by_side(results: Results, run: Run, timing: dict[str, Any]) -> None:
    """Measure ranks that compute at once and exchange nothing, as many as a host of a run has; once in each round.

    Args:
        timing: of the run.
    """
    threads, count = timing["threads"], ranks_at_once(timing)
    if count == 1 or count > results.plan.hosts[0].slots:
        return
    shape = Shape(hosts=1, per_host=count)
    done = results.baselines.side_by_side.setdefault((run.batch, threads, count), [])
    if any(earlier.round == run.round for earlier in done):
        return
    measured = Run(shape=shape, strategy=run.strategy, scaling="side by side", round=run.round, batch=run.batch)
    done.append(_run_once(measured, results.plan, threads, exchanges=False))
    _report_run(done[-1])


def _measure_beside_compute(results: Results, run: Run) -> None:
    """Measure an exchange beside as much computing as a step of the run has."""
    compute_s = results.computed_between(run)
    if compute_s is None:
        return
    size = results.first()["gradient_bytes"]
    try:
        seconds = time_beside_compute(results.plan, run.shape, run.strategy, size, compute_s)
    except JobError as error:
        _print_line(f"{run}: its exchange beside computing cannot be measured: {error}")
    else:
        results.beside_compute.setdefault((run.shape, run.strategy, run.batch), []).append(seconds)


def _measure_single_rank(results: Results, number: int, batch: int, threads: int) -> Run:
    """Run a single rank with so many threads, once in each round, and return the run of the latest round."""
    done = results.baselines.alone.setdefault((batch, threads), [])
    if not any(run.round == number for run in done):
        run = Run(shape=_SINGLE, strategy="single", scaling="alone", round=number, batch=batch)
        done.append(_run_once(run, results.plan, threads))
        _report_run(done[-1])
    return done[-1]


def _run_once(run: Run, plan: Plan, threads: int | None = None, *, exchanges: bool = True) -> Run:
    try:
        timing = time_steps(
            plan, run.shape, run.strategy, run.batch, threads=threads, options=run.options, exchanges=exchanges
        )
    except JobError as error:
        return run.ended(problem=str(error))
    return run.ended(timing=timing)


def _planned_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs, round by round, so that a slow phase of the machine affects all shapes alike."""
    for number in range(1, options.repeats + 1):
        for scaling, shape in product(options.scaling, options.shapes):
            batch = options.batch_size if scaling == "weak" else options.batch_size // shape.ranks
            if shape != _SINGLE:
                for strategy in options.strategies:
                    yield Run(shape=shape, strategy=strategy, scaling=scaling, round=number, batch=batch)
            elif scaling == options.scaling[0]:  # a single rank is the same in weak and strong scaling
                yield Run(shape=shape, strategy="single", scaling="both", round=number, batch=batch)


def _write_results(results: Results, folder: Path) -> None:
    write_json(folder / "scaling.json", results)
    print(render_text(results))
    if importlib.util.find_spec("matplotlib") is None:
        print("trainer: scaling.svg and scaling.html need matplotlib: `pip install matplotlib`", file=sys.stderr)
        return
    draw(folder / "scaling.svg", results)
    write_page(folder / "scaling.html", results)
    print(f"\n{folder}: scaling.json, scaling.svg, scaling.html")


def _report_run(run: Run, number: str = "") -> None:
    outcome = run.problem or f"{run.samples_per_s:,.0f} samples/s, {run.timing['steps']} steps"  # type: ignore[index]
    _print_line(f"{number}{run}: {outcome}")


def _print_line(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
