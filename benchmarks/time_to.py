"""Time trainings between two containers until they reach a target, on slow links, with each way to send less.

    DATA_DIR=/path/to/data docker compose up -d
    python benchmarks/time_to.py                         # as root, with Docker, tc and nsenter; two hours

Every setting trains the 25 MB network of examples/mnist.py to a test accuracy, and a transformer with 13 MB of
gradients to a loss on held-out text, on two ranks of each of the running nodes a and b, under ddp. The seconds are
those of training on the slowest rank, without the evaluations, one every 16 updates.
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

from benchmarks.links import LINKS, ON_A, ROOT, output, shaped
from benchmarks.machine import describe_machine
from benchmarks.time_to_job import RESULT, TASKS, Result
from measuring import INTERRUPTS, interrupt_on, parser_of
from trainer.errors import TrainerError
from trainer.watch.failure import report_failures

SETTINGS = ("compression=none", "compression=fp16", "compression=powersgd:8", "sync_every=8")
FOLDER = "runs/time-to"
"""On the nodes, which share it."""
_TIMEOUT_S = 1800.0


def main() -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    options = _parse_args()
    _prepare_nodes(options.networks)
    print(", ".join(f"{name} {fact}" for name, fact in describe_machine().items()))
    print("| link | network | setting | s to it | updates to it | score at the end |", "|---" * 6 + "|", sep="\n")
    for link in options.only:
        with shaped(link):
            for network in options.networks:
                for setting in options.settings:
                    found = [launch(network, setting, seed, options.whole) for seed in options.seeds]
                    print(row(link, network, setting, found), flush=True)
    return 0


def row(link: str, network: str, setting: str, found: Sequence[Result]) -> str:
    """Return the table's row for the seeds of a training."""
    task, reached = TASKS[network], [one for one in found if one.reached is not None]
    cells = [link, f"{network} to {task.target:g} {task.score_unit}", setting, _spread((r.seconds for r in reached), 1)]
    cells += [_spread((one.reached or 0 for one in reached), 0), _spread((one.score for one in found), 2)]
    return f"| {' | '.join(cells)} |"


def _spread(values: Iterable[float], digits: int) -> str:
    """Return the median, and least and greatest where there are several values; nothing where there are none."""
    found = sorted(values)
    if not found:
        return ""
    median, least, most = (f"{one:,.{digits}f}" for one in (statistics.median(found), found[0], found[-1]))
    return f"{median} ({least} – {most})" if len(found) > 1 else median


def launch(network: str, setting: str, seed: int, whole: bool) -> Result:
    """Run a training on both nodes; return its result. The ranks' progress goes to stderr."""
    command = ["horovodrun", "-np", "4", "-H", "a:2,b:2", "python", f"{FOLDER}/time_to_job.py", network]
    command += ["--settings", setting, "--seed", str(seed), *(["--whole"] if whole else [])]
    print(f"{time.strftime('%H:%M:%S')} {' '.join(command)}", file=sys.stderr, flush=True)
    try:
        ended = subprocess.run(
            [*ON_A, *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False,
            timeout=_TIMEOUT_S,
        )  # fmt: skip
    except (KeyboardInterrupt, subprocess.TimeoutExpired) as error:  # which end only the client
        with suppress(TrainerError):  # where it has ended meanwhile
            output(*ON_A, "pkill", "horovodrun")
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TrainerError(f"{network}, {setting}: has not ended after {_TIMEOUT_S:g} s") from None
    result = read_result(ended.stdout)
    if ended.returncode or result is None:
        raise TrainerError(f"{network}, {setting}: code {ended.returncode} and {'a' if result else 'no'} result")
    return result


def read_result(printed: str) -> Result | None:
    """Return the result that a job has printed, also behind a launcher's mark of the rank; None where it has not."""
    found = re.search(rf"{RESULT}(\{{.*\}})\s*$", printed, re.M)
    return Result(**json.loads(found[1])) if found else None


def _prepare_nodes(networks: Sequence[str]) -> None:
    """Copy the job to the nodes, whose image has nothing of benchmarks/, and look for MNIST."""
    script = f"mkdir -p {FOLDER} && cat > {FOLDER}/time_to_job.py"
    with (ROOT / "benchmarks/time_to_job.py").open() as job:
        if subprocess.run([*ON_A, "sh", "-c", script], cwd=ROOT, stdin=job, check=False).returncode:
            raise TrainerError("node a does not take the job; start both nodes with `docker compose up --build -d`")
    looks = [*ON_A, "test", "-d", "data/MNIST"]
    if "mnist" in networks and subprocess.run(looks, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode:
        raise TrainerError("the nodes have no MNIST; start them with `DATA_DIR=/path/to/data docker compose up -d`")


def _parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    slow = [name for name, rule in LINKS.items() if rule]
    add("--only", nargs="+", default=slow, choices=LINKS, help="links (default: the slow ones)")
    add("--networks", nargs="+", default=list(TASKS), choices=TASKS, help="default: all")
    add("--settings", nargs="+", default=list(SETTINGS), metavar="NAME=VALUE", help=f"default: {' '.join(SETTINGS)}")
    add("--seeds", nargs="+", type=int, default=[0], metavar="N", help="default: 0")
    add("--whole", action="store_true", help="train to the end, and not only to the target")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
