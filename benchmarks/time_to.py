"""Times trainings between two containers until they reach a target, on slow links, with each way to send less.

    DATA_DIR=/path/to/data docker compose up -d
    python benchmarks/time_to.py                         # as root, with Docker, tc and nsenter; two hours

Every setting trains the 25 MB network of examples/mnist.py to a test accuracy, and a transformer with 13 MB of
gradients to a loss on held-out text, on two ranks of each of the running nodes a and b, under ddp. The seconds are
those of training on the slowest rank, without the evaluations, one every 16 updates. Results are added to those in
--json, and the table shows all of them, so links, networks and settings can be measured one at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.links import LINKS, ON_A, ROOT, check_links, output, shaped
from benchmarks.machine import describe_machine
from benchmarks.time_to_job import RESULT, TASKS, Result, parse_settings
from trainer.config import RunConfig, settings_from
from trainer.errors import ConfigError, TrainerError
from trainer.files import check_writable, write_atomically
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.watch.failure import report_failures

SETTINGS = ("compression=none", "compression=fp16", "compression=powersgd:8", "sync_every=8")
FOLDER = "runs/time-to"
"""On the nodes, which share it."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and to which test score."""

    link: str
    network: str
    setting: str
    seed: int
    target: float

    def __str__(self) -> str:
        return f"{self.link}, {self.network} to {self.target:g}, {self.setting}, seed {self.seed}"


Results = dict[Training, Result]


def main() -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    options = _parse_args()
    check_writable(options.json)
    results = read(options.json.read_text()) if options.json.exists() and options.limit is None else {}
    _prepare_nodes(options.networks)
    for link in options.only:
        with shaped(LINKS[link]) as check:
            for one in _trainings(link, options):
                print(f"{time.strftime('%H:%M:%S')} {one}", file=sys.stderr, flush=True)
                result = launch(one, options)
                check()
                results[one] = result
                print(f"{one}: {result}", file=sys.stderr, flush=True)
                if options.limit is None:
                    write_atomically(options.json, write(results))
    print(", ".join(f"{name} {fact}" for name, fact in describe_machine().items()))
    print(render(results))
    return 0


def read(text: str) -> Results:
    """Return the results that `write` has written; raise `TrainerError` for another text."""
    try:
        results = {Training(**one["training"]): Result(**one["result"]) for one in json.loads(text)}
        if strange := [one for one in results if one.link not in LINKS or one.network not in TASKS]:
            raise ValueError(strange[0])
    except (ValueError, TypeError, KeyError) as error:
        raise TrainerError(f"the file of --json has no results of time_to.py ({error}); name another one") from None
    return results


def write(results: Results) -> str:
    """Return the results as JSON."""
    found = [{"training": asdict(training), "result": asdict(result)} for training, result in results.items()]
    return json.dumps(found, indent=1) + "\n"


def render(results: Results) -> str:
    """Return a table with a row for each link, network, target and setting; several seeds as median and range."""
    lines = [
        "| link | network | setting | s to it | updates to it | score at the end | throughput |",
        "|---|---|---|---|---|---|---|",
    ]
    order = (tuple(LINKS), tuple(TASKS))
    rows: dict[tuple[str, str, float, str], list[Result]] = {}
    for one in sorted(results, key=lambda one: (order[0].index(one.link), order[1].index(one.network))):
        rows.setdefault((one.link, one.network, one.target, one.setting), []).append(results[one])
    for (link, network, target, setting), found in rows.items():
        task = TASKS[network]
        reached = [one for one in found if one.reached is not None]
        missed = f"not in {max(one.updates for one in found)}" if len(reached) < len(found) else ""
        cells = [
            *(link, f"{network} to {target:g} {task.score_unit}", setting),
            _spread((one.seconds for one in reached), 1),
            ", ".join(filter(None, (_spread((one.updates for one in reached), 0), missed))),
            f"{_spread((one.score for one in found), 2)} {task.score_unit}",
            f"{_spread((one.per_s for one in found), 0)} {task.items[1]}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Iterable[float], digits: int) -> str:
    """Return the median, and least and greatest where there are several values; nothing where there are none."""
    found = sorted(values)
    if not found:
        return ""
    median, least, most = (f"{one:,.{digits}f}" for one in (statistics.median(found), found[0], found[-1]))
    return f"{median} ({least}–{most})" if len(found) > 1 else median


def launch(one: Training, options: argparse.Namespace) -> Result:
    """Run a training on both nodes; return its result. The ranks' progress goes to stderr."""
    command = ["horovodrun", "-np", "4", "-H", "a:2,b:2", "python", f"{FOLDER}/time_to_job.py", one.network]
    command += ["--settings", one.setting, "--seed", str(one.seed), "--to", str(one.target)]
    command += ["--limit", str(options.limit)] if options.limit else []
    try:
        ended = subprocess.run(
            [*ON_A, *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False,
            timeout=options.timeout,
        )  # fmt: skip
    except (KeyboardInterrupt, subprocess.TimeoutExpired) as error:  # which end only the client
        with suppress(TrainerError):  # where it has ended meanwhile
            output(*ON_A, "pkill", "horovodrun")
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TrainerError(f"{one}: has not ended after {options.timeout:g} s") from None
    result = read_result(ended.stdout)
    if ended.returncode or result is None:
        raise TrainerError(f"{one}: ended with code {ended.returncode} and {'a' if result else 'no'} result")
    return result


def read_result(printed: str) -> Result | None:
    """Return the result that a job has printed, also behind a launcher's mark of the rank; None where it has not."""
    found = re.search(rf"{RESULT}(\{{.*\}})\s*$", printed, re.M)
    return Result(**json.loads(found[1])) if found else None


def _trainings(link: str, options: argparse.Namespace) -> list[Training]:
    return [
        Training(link=link, network=network, setting=setting, seed=seed, target=options.targets[network])
        for seed in options.seeds
        for network in options.networks
        for setting in options.settings
    ]


def _prepare_nodes(networks: Sequence[str]) -> None:
    """Copy the job to the nodes, whose image has nothing of benchmarks/, and look for MNIST."""
    script = f"mkdir -p {FOLDER} && cat > {FOLDER}/time_to_job.py"
    with (ROOT / "benchmarks/time_to_job.py").open() as job:
        if subprocess.run([*ON_A, "sh", "-c", script], cwd=ROOT, stdin=job, check=False).returncode:
            raise TrainerError("node a does not take the job; start both nodes with `docker compose up --build -d`")
    looks = [*ON_A, "test", "-d", "data/MNIST"]
    if "mnist" in networks and subprocess.run(looks, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode:
        raise TrainerError("the nodes have no MNIST; start them with `DATA_DIR=/path/to/data docker compose up -d`")


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    links = [name for name in LINKS if name != "unlimited"]
    add("--only", nargs="+", default=links, metavar="LINK", help=f"of {', '.join(LINKS)} (default: all slow ones)")
    add("--networks", nargs="+", default=list(TASKS), metavar="NAME", help=f"of {', '.join(TASKS)} (default: both)")
    add("--settings", nargs="+", default=list(SETTINGS), metavar="NAME=VALUE", help=f"default: {' '.join(SETTINGS)}")
    add("--seeds", nargs="+", type=int, default=[0], metavar="N", help="default: 0")
    defaults = " ".join(f"{name}={task.target:g}" for name, task in TASKS.items())
    add("--to", nargs="+", default=[], metavar="NAME=SCORE", help=f"targets (default: {defaults})")
    add("--limit", type=int, metavar="N", help="for a trial: end each training after so many updates; nothing is kept")
    add("--timeout", type=float, default=1800.0, metavar="S", help="of one training (default: %(default)s)")
    add("--json", type=Path, default=Path("time-to.json"), metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    check_links(options.only)
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit is {options.limit}; it must be at least 1")
    for name in options.networks:
        _check_network("--networks", name)
    for setting in options.settings:
        settings_from(RunConfig, "trainer.init", **parse_settings(setting))
    options.targets = {name: task.target for name, task in TASKS.items()} | _targets(options.to)
    return options


def _targets(texts: Sequence[str]) -> dict[str, float]:
    """Return the targets in texts such as "mnist=97"."""
    targets = {}
    for text in texts:
        name, _, score = text.partition("=")
        _check_network("--to", name)
        try:
            targets[name] = float(score)
        except ValueError:
            raise ConfigError(f"--to has {text!r}; it is a network and a score, as in mnist=97") from None
    return targets


def _check_network(option: str, name: str) -> None:
    if name not in TASKS:
        raise ConfigError(f"{option} has {name!r}; valid are {', '.join(TASKS)}")


if __name__ == "__main__":
    sys.exit(main())
