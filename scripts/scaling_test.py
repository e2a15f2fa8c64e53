"""Does it scale, and if not, why: the same training on 1x1, 1x2, 2x1 and 2x2, measured, taken apart and explained.

    python scripts/scaling_test.py                                  # on this host: 1x1 and 1x2
    python scripts/scaling_test.py --hosts a:2,b:2                  # on two hosts, from a
    python scripts/scaling_test.py --hosts a:2,b:2 --strategies horovod,ddp,ring,parameter_server
    python scripts/scaling_test.py --hosts a:2,b:2 my_training.py --epochs 1

Any script that trains through Trainer or trainer.prepare will do; what stands behind it are its own arguments. Every
shape (hosts x ranks on each) is run several times, in turns. Weak scaling keeps the samples per rank and step, so that
the global batch grows; strong scaling keeps the global batch. Each step is taken apart (trainer/timing.py), the network
is measured with scripts/comm_bench.py, and from one rank by itself and the network alone the other shapes are
predicted, those that were measured for comparison. Results go to a folder: scaling.json, scaling.svg, and scaling.html
with all of it. Interrupted, it keeps what was measured until then.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from scaling.jobs import JobError, Plan, time_network, time_steps
from scaling.models import Shape
from scaling.options import parse_args
from scaling.report import draw, show, write_json, write_page
from scaling.results import Results, Run
from tqdm import tqdm

from trainer.errors import TrainerError
from trainer.files import check_writable
from trainer.launch.failure import report_failures
from trainer.launch.processes import INTERRUPTS, interrupt_on
from trainer.tuning.host import host_cores

_ALONE = Shape(hosts=1, per_host=1)


def main() -> int:
    report_failures()
    options = parse_args(__doc__)
    interrupt_on(*INTERRUPTS)
    plan = options.plan
    _make_folder(options.output)
    results = Results(plan=plan, batch=options.batch_size, command=sys.argv)
    todo = list(_runs(options))
    code = 0
    bar = tqdm(total=len(todo) + 1, desc="scaling", unit="job", disable=not sys.stderr.isatty(), file=sys.stderr)
    try:
        _measure(results, todo, options, bar)
    except KeyboardInterrupt:
        results.interrupted, code = True, 130
        for number in INTERRUPTS:  # what follows takes a moment, and is what was measured for
            signal.signal(number, signal.SIG_IGN)
        _say(bar, f"interrupted after {len(results.runs)} of {len(todo)} runs; what follows is what they say")
    bar.close()
    if any(run.timing for run in results.runs):
        _hand_over(results, options.output)
    return code or int(bool(results.problems()))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / "scaling.json")
    except OSError as error:
        raise TrainerError(f"--output {folder} cannot be written: {error.strerror or error}") from None


def _measure(results: Results, todo: Sequence[Run], options: argparse.Namespace, bar: Any) -> None:
    """One rank by itself, the network, then everything in turns."""
    plan, file = options.plan, options.output / "scaling.json"
    share = max(1, host_cores() // max(shape.per_host for shape in options.shapes))
    first = _by_itself(results, 1, options.batch_size, share, bar)
    if first.timing is None:
        raise TrainerError(f"one rank by itself cannot be measured: {first.problem}")
    write_json(file, results)
    if any(shape != _ALONE for shape in options.shapes):
        try:
            size, device = first.timing["gradient_bytes"], first.timing["device"]
            results.networks = time_network(plan, options.strategies, size, device)
        except JobError as error:
            results.no_network = str(error)
            _say(bar, f"the network cannot be measured: {error}")
    bar.update()
    for run in todo:
        _by_itself(results, run.round, options.batch_size, share, bar)
        done = _run_once(run, plan)
        results.runs.append(done)
        _tell(bar, done)
        if done.timing is not None and done.shape != _ALONE:  # beside a rank that has as many threads
            for batch in dict.fromkeys((done.batch, options.batch_size)):
                _by_itself(results, done.round, batch, done.timing["threads"], bar)
        write_json(file, results)
    for run, promise in results.promises() if options.try_advice else ():
        tried = _run_once(run, plan)
        results.tried.append((tried, promise))
        _tell(bar, tried)
        write_json(file, results)


def _by_itself(results: Results, number: int, batch: int, threads: int, bar: Any) -> Run:
    """One rank, alone on its host, with so many threads; once in each round, like what it is held against."""
    done = results.alone.setdefault((batch, threads), [])
    if not any(run.round == number for run in done):
        run = Run(shape=_ALONE, strategy="single", scaling="alone", round=number, batch=batch)
        done.append(_run_once(run, results.plan, threads))
        _tell(bar, done[-1], counts=False)
    return done[-1]


def _run_once(run: Run, plan: Plan, threads: int | None = None) -> Run:
    try:
        timing = time_steps(plan, run.shape, run.strategy, run.batch, threads=threads, options=run.options)
    except JobError as error:
        return run.ended(problem=str(error))
    return run.ended(timing=timing)


def _runs(options: argparse.Namespace) -> Iterator[Run]:
    """All runs, each round whole, so that what slows the machine down for a while slows all of them."""
    for number in range(1, options.repeats + 1):
        for scaling, shape in product(options.scaling, options.shapes):
            batch = options.batch_size if scaling == "weak" else options.batch_size // shape.ranks
            if shape != _ALONE:
                for strategy in options.strategies:
                    yield Run(shape=shape, strategy=strategy, scaling=scaling, round=number, batch=batch)
            elif scaling == options.scaling[0]:  # it is the same in both
                yield Run(shape=shape, strategy="single", scaling="both", round=number, batch=batch)


def _hand_over(results: Results, folder: Path) -> None:
    write_json(folder / "scaling.json", results)
    print(show(results))
    if importlib.util.find_spec("matplotlib") is None:
        print("trainer: no picture and no page without matplotlib: `pip install trainer[plots]`", file=sys.stderr)
        return
    draw(folder / "scaling.svg", results)
    write_page(folder / "scaling.html", results)
    print(f"\n{folder}: scaling.json, scaling.svg, scaling.html")


def _tell(bar: Any, run: Run, *, counts: bool = True) -> None:
    bar.update(counts)
    words = run.problem or f"{run.samples_per_s:,.0f} samples/s, {run.timing['steps']} steps"  # type: ignore[index]
    _say(bar, f"{run}: {words}")


def _say(bar: Any, text: str) -> None:
    bar.write(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
