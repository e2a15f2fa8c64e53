"""Kills ranks and a node at random while `trainer run` trains on two containers, and checks what comes of it.

    docker compose up --build -d
    python benchmarks/chaos.py                # with MNIST in the nodes' data/; fifteen minutes

Every 40 to 70 seconds a rank on one of the nodes a and b is killed, or node b, which is started again some seconds
later. At the end the test accuracy has to be at least 99 %, each sample has to be in each epoch of the result exactly
once, and no process may be left. A table shows the faults and the recoveries, from the fault to the first update after
it. The exit code is 1 when something was not as it has to be.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos_records import problems_of, read_result, read_starts, recovery_s, repeated_s, trained_s
from trainer.errors import TrainerError
from trainer.watch.failure import report_failures

ROOT = Path(__file__).resolve().parent.parent
NODES = ("a", "b")
FOLDER = "runs/chaos"
"""On the nodes, which share it."""
CHECKPOINTS = "/tmp/chaos"  # noqa: S108 (on each node's own disk)
PAUSE_S, DOWN_S = (40.0, 70.0), (5.0, 15.0)
HOST_EVERY = 3
"""Faults of which one, on average, is the loss of a node."""
TARGET_PERCENT = 99.0
_LEFT_WITHIN_S = 30.0


@dataclass(frozen=True)
class Fault:
    """What was done to the job."""

    kind: str
    """"rank" or "node"."""
    node: str
    time: float
    """Seconds since 1970."""


class Compose:
    """`docker compose` on the running nodes."""

    def __init__(self, files: Sequence[str], project: str | None) -> None:
        named = ["--project-name", project] if project else []
        self.command = ["docker", "compose", *named, *(word for file in files for word in ("--file", file))]

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a compose command; its output is captured."""
        done = subprocess.run(
            [*self.command, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise TrainerError(f"docker compose {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done

    def shell(self, node: str, script: str, check: bool = True) -> str:
        """Run a shell script on a node; return its output."""
        return self.run("exec", "-T", node, "sh", "-c", script, check=check).stdout


class Chaos(threading.Thread):
    """Does harm at random, until `stop` is set. Ends with node b up.

    Args:
        seed: of the kinds of faults and the pauses between them. The moments within the training differ all the same.
    """

    def __init__(self, compose: Compose, seed: int) -> None:
        super().__init__(daemon=True)
        self.faults: list[Fault] = []
        self.stop = threading.Event()
        self._compose, self._random = compose, random.Random(seed)  # noqa: S311 (no secret)

    def run(self) -> None:
        while not self.stop.wait(self._random.uniform(*PAUSE_S)):
            if self._random.randrange(HOST_EVERY) == 0:
                self._kill_node()
            else:
                self._kill_rank(*self._random.sample(NODES, 2))

    def _kill_rank(self, *nodes: str) -> None:
        """Kill a rank on the first of these nodes that has one; none has while the job is being started."""
        which = self._random.choice(("--oldest", "--newest"))
        while not self.stop.is_set():
            for node in nodes:
                kill = ("exec", "-T", node, "pkill", "-KILL", which, "-f", f"^python {FOLDER}/chaos_job.py")
                if self._compose.run(*kill, check=False).returncode == 0:
                    self._note("rank", node)
                    return
            self.stop.wait(1.0)

    def _kill_node(self) -> None:
        self._note("node", "b")
        self._compose.run("kill", "b")
        self.stop.wait(self._random.uniform(*DOWN_S))
        self._compose.run("start", "b")

    def _note(self, kind: str, node: str) -> None:
        self.faults.append(Fault(kind, node, time.time()))
        print(
            f"{time.strftime('%H:%M:%S')} chaos: {kind} {f'on {node}' if kind == 'rank' else node} killed", flush=True
        )


def main() -> int:
    report_failures()
    options = _parse_args()
    compose = Compose(options.file, options.project)
    _prepare(compose)
    chaos = Chaos(compose, options.seed)
    began = time.time()
    chaos.start()
    command = [
        *["trainer", "run", "--name", "chaos", "-np", "4", "-H", "a:2,b:2", "--min-np", "2"],
        *["--timeout", "60", "python", f"{FOLDER}/chaos_job.py", FOLDER, str(options.epochs), CHECKPOINTS],
    ]
    # The client's input stays open: horovodrun ends a job whose input ends.
    with subprocess.Popen([*compose.command, "exec", "-T", "a", *command], cwd=ROOT, stdin=subprocess.PIPE) as job:
        code = job.wait()
    took_s = time.time() - began
    chaos.stop.set()
    chaos.join()
    compose.run("cp", f"a:/trainer/{FOLDER}/.", str(options.output))
    problems = [f"trainer run has ended with code {code}"] if code else []
    problems += _left_over(compose)
    return report(options.output, chaos.faults, took_s, problems)


def _prepare(compose: Compose) -> None:
    for node in NODES:
        compose.shell(node, f"rm -rf {FOLDER} {CHECKPOINTS} && mkdir -p {FOLDER} && test -d data/MNIST")
    compose.run("cp", "benchmarks/chaos_job.py", f"a:/trainer/{FOLDER}/")


def _left_over(compose: Compose) -> list[str]:
    """Return the processes of the job that are still there after a while."""
    deadline = time.monotonic() + _LEFT_WITHIN_S
    while True:
        found = [
            f"left on node {node}: {line}"
            for node in NODES
            for line in compose.shell(
                node, "ps -eo args | grep -E 'chaos_job|[o]rted|[h]orovodrun'", check=False
            ).splitlines()
            if "grep" not in line
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def report(folder: Path, faults: Sequence[Fault], took_s: float, problems: list[str]) -> int:
    """Print what has come of it; return the exit code."""
    starts = read_starts(folder)
    lineage: list[tuple[str, int]] = []
    if (folder / "result.json").exists():
        result = read_result(folder)
        lineage += result.lineage
        problems += problems_of(result, starts)
        print(f"\ntest accuracy {result.accuracy:.2f} % after {result.epochs} epochs")
        if result.accuracy < TARGET_PERCENT:
            problems.append(f"the test accuracy is below {TARGET_PERCENT} %")
    else:
        problems.append("there is no result")
    summary = _summary(folder)
    print(f"{took_s:.0f} s, {len(faults)} faults, {len(summary['attempts'])} attempts\n")
    print("| fault | times | median recovery | p95 | longest |\n|---|---|---|---|---|")
    for kind in ("rank", "node"):
        print(_row(kind, [recovery_s(fault.time, starts) for fault in faults if fault.kind == kind]))
    print(f"\n{trained_s(starts) / took_s:.0%} of the time was training")
    if lineage:
        print(f"{repeated_s(lineage, starts) / took_s:.1%} was training that was lost, and done again")
    parts = [entry["recovery_s"] for entry in summary["attempts"] if entry["recovery_s"]]
    for name in parts[0] if parts else ():
        print(f"{name}: median {statistics.median(part[name] for part in parts):.1f} s of a restart")
    print("\n".join(problems) if problems else "each sample once in each epoch; no process left")
    return int(bool(problems))


def _summary(folder: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return next((event for event in reversed(events) if event["event"] == "summary"), {"attempts": []})


def _row(kind: str, recoveries: Sequence[float | None]) -> str:
    known = sorted(seconds for seconds in recoveries if seconds is not None)
    if not known:
        return f"| {kind} | {len(recoveries)} | – | – | – |"
    p95 = statistics.quantiles(known, n=20, method="inclusive")[-1] if len(known) > 1 else known[0]
    return f"| {kind} | {len(recoveries)} | {statistics.median(known):.1f} s | {p95:.1f} s | {known[-1]:.1f} s |"


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--epochs", type=int, default=75, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("chaos"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--file", action="append", default=[], help="of docker compose, as often as needed")
    parser.add_argument("--project", help="of docker compose")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
