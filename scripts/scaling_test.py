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
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scaling_jobs import TRANSPORT_OF, JobError, Plan, parse_hosts, parse_shapes, time_network, time_steps
from scaling_models import Shape
from scaling_report import draw, show, write_json, write_page
from scaling_results import Results, Run

from trainer.errors import ConfigError, TrainerError
from trainer.failure import report_failures
from trainer.results import check_writable

SCALINGS = ("weak", "strong")
_ALONE = Shape(hosts=1, per_host=1)


def main() -> int:
    report_failures()
    options = _parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    plan = options.plan
    _make_folder(options.output)
    results = Results(plan=plan, batch=options.batch_size, command=sys.argv)
    todo = list(_runs(options))
    code = 0
    bar = tqdm(total=len(todo) + 2, desc="scaling", unit="job", disable=not sys.stderr.isatty(), file=sys.stderr)
    try:
        _measure(results, todo, options, bar)
    except KeyboardInterrupt:
        results.interrupted, code = True, 130
        _say(bar, f"interrupted after {len(results.runs)} of {len(todo)} runs; what follows is what they say")
    bar.close()
    if any(run.timing for run in results.runs):
        _hand_over(results, options.output)
    return code or int(any(run.problem for run in results.runs))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / "scaling.json")
    except OSError as error:
        raise TrainerError(f"--output {folder} cannot be written: {error.strerror or error}") from None


def _measure(results: Results, todo: Sequence[Run], options: argparse.Namespace, bar: Any) -> None:
    """One rank by itself, the network, then everything in turns; saved after each."""
    plan = options.plan
    share = max(1, (os.cpu_count() or 1) // max(shape.per_host for shape in options.shapes))
    alone = _run_once(
        Run(shape=_ALONE, strategy="single", scaling="alone", round=1, batch=options.batch_size), plan, share
    )
    results.alone.append(alone)
    _tell(bar, alone)
    if alone.timing is None:
        raise TrainerError(f"one rank by itself cannot be measured: {alone.problem}")
    for batch in sorted({run.batch for run in todo} - {options.batch_size}):
        results.alone.append(
            _run_once(Run(shape=_ALONE, strategy="single", scaling="alone", round=1, batch=batch), plan, share)
        )
    device, size = alone.timing["device"], alone.timing["gradient_bytes"]
    if any(shape != _ALONE for shape in options.shapes):
        try:
            results.networks = time_network(plan, options.strategies, size, device)
        except JobError as error:
            results.problems.append(f"the network cannot be measured: {error}")
            _say(bar, results.problems[-1])
    bar.update()
    for run in todo:
        done = _run_once(run, plan)
        results.runs.append(done)
        _tell(bar, done)
        write_json(options.output / "scaling.json", results)
    if options.try_advice:
        for run, promise in results.promises():
            tried = _run_once(run, plan)
            results.tried.append((tried, promise))
            _tell(bar, tried)


def _run_once(run: Run, plan: Plan, threads: int | None = None) -> Run:
    try:
        timing = time_steps(plan, run.shape, run.strategy, run.batch, threads=threads, options=run.options)
    except JobError as error:
        return run.ended(problem=str(error))
    return run.ended(timing=timing)


def _runs(options: argparse.Namespace) -> Iterator[Run]:
    """All runs, each round whole, so that what slows the machine down for a while slows all of them."""
    for number in range(1, options.repeats + 1):
        for scaling in options.scaling:
            for shape in options.shapes:
                batch = options.batch_size if scaling == "weak" else options.batch_size // shape.ranks
                if shape == _ALONE:
                    if scaling == options.scaling[0]:  # is the same in both
                        yield Run(shape=shape, strategy="single", scaling="both", round=number, batch=batch)
                    continue
                for strategy in options.strategies:
                    yield Run(shape=shape, strategy=strategy, scaling=scaling, round=number, batch=batch)


def _hand_over(results: Results, folder: Path) -> None:
    write_json(folder / "scaling.json", results)
    print(show(results))
    if importlib.util.find_spec("matplotlib") is None:
        print("trainer: no picture and no page without matplotlib: `pip install trainer[plots]`", file=sys.stderr)
        return
    draw(folder / "scaling.svg", results)
    write_page(folder / "scaling.html", results)
    print(f"\n{folder}: scaling.json, scaling.svg, scaling.html")


def _tell(bar: Any, run: Run) -> None:
    bar.update()
    words = run.problem or f"{run.samples_per_s:,.0f} samples/s, {run.timing['steps']} steps"  # type: ignore[index]
    _say(bar, f"{run}: {words}")


def _say(bar: Any, text: str) -> None:
    bar.write(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    cores = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add(
        "--hosts",
        default=f"localhost:{max(2, cores)}",
        metavar="LIST",
        help="hosts with their slots, this one first (default: %(default)s)",
    )
    add("--shapes", metavar="LIST", help="hosts x ranks on each (default: one and all hosts, with one and all slots)")
    add("--strategies", default="horovod", metavar="LIST", help=f"of {','.join(TRANSPORT_OF)} (default: %(default)s)")
    add("--scaling", default=",".join(SCALINGS), metavar="LIST", help="weak, strong or both (default: %(default)s)")
    add(
        "--batch-size",
        type=int,
        default=100,
        metavar="N",
        help="samples per step of one rank by itself (default: %(default)s)",
    )
    add(
        "--batch-flag",
        default="--batch-size",
        metavar="FLAG",
        help="by which the script takes it; '' for none (default: %(default)s)",
    )
    add(
        "--steps",
        default="100",
        metavar="N|all",
        help="to measure in each run, after 5 to warm up (default: %(default)s)",
    )
    add("--repeats", type=int, default=3, metavar="N", help="runs of each (default: %(default)s)")
    add(
        "--timeout",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds after which a run is ended (default: %(default)s)",
    )
    add("--try-advice", action="store_true", help="follow it, with the options of examples/mnist.py, and compare")
    add(
        "--output",
        type=Path,
        default=Path("runs/scaling"),
        metavar="DIR",
        help="for the results (default: %(default)s)",
    )
    add(
        "script",
        nargs=argparse.REMAINDER,
        help="and its arguments (default: examples/mnist.py --epochs 1 --output none)",
    )
    options = parser.parse_args()
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    for name in ("repeats", "batch_size", "timeout"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be positive")
    if options.steps != "all" and (not options.steps.isdecimal() or int(options.steps) < 1):
        raise ConfigError(f"--steps is {options.steps!r}; valid is a positive number, or all")
    for name, valid in (("strategies", tuple(TRANSPORT_OF)), ("scaling", SCALINGS)):
        chosen = list(dict.fromkeys(getattr(options, name).split(",")))
        if strange := [one for one in chosen if one not in valid]:
            raise ConfigError(f"--{name} has {strange[0]!r}; valid are {', '.join(valid)}")
        setattr(options, name, chosen)
    hosts = parse_hosts(options.hosts)
    options.shapes = parse_shapes(options.shapes, hosts)
    if hosts[0].name not in ("localhost", socket.gethostname()):
        raise ConfigError(
            f"--hosts begins with {hosts[0].name}, and this is {socket.gethostname()}; start it on the first"
        )
    if "strong" in options.scaling and options.batch_flag == "":
        raise ConfigError(
            "strong scaling needs --batch-flag, by which the script takes its batch; valid without is weak"
        )
    uneven = [shape for shape in options.shapes if options.batch_size % shape.ranks]
    if "strong" in options.scaling and uneven:
        raise ConfigError(
            f"--batch-size is {options.batch_size}, which {uneven[0].ranks} ranks cannot share in strong scaling"
        )
    script = options.script or ["examples/mnist.py", "--epochs", "1", "--output", "none"]
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]}")
    options.plan = Plan(
        hosts=hosts,
        script=[str(Path(script[0]).resolve()), *script[1:]],
        batch_flag=options.batch_flag,
        steps=None if options.steps == "all" else int(options.steps),
        timeout_s=options.timeout,
    )


if __name__ == "__main__":
    sys.exit(main())
