"""Two nodes in containers whose link is made slow: are scaling_test.py's predictions and promises kept?

    docker compose up --build -d
    python benchmarks/shaped_link.py          # as root, with Docker, tc and nsenter; half an hour

Each link is put between the running nodes a and b, scaling_test.py is run on 1x1 and 2x2 with --try-advice, and one
table says by how much the predictions of 2x2 and the promises were off. The exit code is 1 where one is by more than a
fifth, or where something could not be measured. Rates are tc's token buckets on both nodes' eth0. A delay is a wire of
our own (delay_line.py), because not every kernel has netem.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, TrainerError
from trainer.files import check_writable, write_atomically
from trainer.launch.failure import report_failures
from trainer.launch.processes import INTERRUPTS, interrupt_on

ROOT = Path(__file__).resolve().parent.parent
NODES = ("a", "b")
TOLERANCE = 0.2


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What lies between the nodes."""

    rate: str | None = None
    """As tc reads it, in each direction."""
    delay_ms: float | None = None
    """In each direction."""
    network: str = "large"
    """Of examples/mnist.py."""
    steps: int = 20


WIRES = {
    "1gbit": Wire(rate="1gbit", steps=40),
    "100mbit": Wire(rate="100mbit", steps=10),
    "20ms": Wire(delay_ms=20, network="default", steps=20),
}


def main() -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    options = _parse_args()
    check_writable(options.json)
    found: dict[str, Any] = {}
    for name in options.only:
        with wire(WIRES[name]):
            found[name] = measure(name, WIRES[name], options)
        write_atomically(options.json, json.dumps(found, indent=1) + "\n")
    compared = [one for name, result in found.items() for one in compare(name, result)]
    print("\n".join(["", "| link | strategy | what | promised | measured | off by |", "|---|---|---|---|---|---|"]))
    print("\n".join(map(str, compared)))
    kept = [one for one in compared if abs(one.off) <= TOLERANCE]
    print(f"\n{len(kept)} of {len(compared)} within {TOLERANCE:.0%}")
    failed = [f"{name}: {problem}" for name, result in found.items() for problem in result["problems"]]
    print("\n".join(failed))
    return int(len(kept) < len(compared) or bool(failed) or not compared)


def measure(name: str, one: Wire, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the scaling test on node a, and returns its JSON."""
    folder = f"runs/shaped-{name}"
    command = [
        *["python", "scripts/scaling_test.py", "--hosts", "a:2,b:2", "--shapes", "1x1,2x2", "--scaling", "weak"],
        *["--strategies", options.strategies, "--steps", str(one.steps), "--repeats", str(options.repeats)],
        *["--try-advice", "--output", folder, "examples/mnist.py", "--network", one.network, "--epochs", "1"],
        *["--output", "none", "--lr", "0.001"],
    ]
    print(f"{time.strftime('%H:%M:%S')} {name}: {' '.join(command)}", file=sys.stderr, flush=True)
    on_a = ["docker", "compose", "exec", "-T", "a"]
    _output(*on_a, "rm", "-rf", folder)  # what an earlier sitting found there is not what this one finds
    try:
        ended = subprocess.run([*on_a, *command], cwd=ROOT, check=False)
    except KeyboardInterrupt:  # which reaches the client alone
        _output(*on_a, "pkill", "-f", "scaling_test.py")
        raise
    result: dict[str, Any] = json.loads(_output(*on_a, "cat", f"{folder}/scaling.json"))
    if ended.returncode and not result["problems"]:
        result["problems"].append(f"scaling_test.py ended early, with code {ended.returncode}")
    return result


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Something that was promised, and what came of it."""

    link: str
    strategy: str
    what: str
    promised: float
    measured: float

    @property
    def off(self) -> float:
        """As a part of what was measured; infinite where nothing was."""
        return self.promised / self.measured - 1 if self.measured else math.inf

    def __str__(self) -> str:
        numbers = (f"{self.promised:,.4g}", f"{self.measured:,.4g}", f"{self.off:+.0%}")
        cells = (self.link, self.strategy, self.what, *numbers)
        return f"| {' | '.join(cells)} |"


def compare(name: str, result: dict[str, Any]) -> Iterator[Compared]:
    """The predictions of 2x2, then the promises."""
    for row in result["rows"]:
        if row["error"] is not None:
            guess, seen = row["predicted_samples_per_s"], row["measured"]["samples_per_s"]
            yield Compared(link=name, strategy=row["strategy"], what="2x2, samples/s", promised=guess, measured=seen)
    for tried in result["tried"]:
        gain, what = tried["promised"]["advice"]["gain"], " ".join(tried["options"])
        seen = tried["samples_per_s"] / tried["promised"]["base"]
        yield Compared(link=name, strategy=tried["strategy"], what=f"{what}, ×", promised=gain, measured=seen)


@contextmanager
def wire(one: Wire) -> Iterator[None]:
    """Puts the link between the nodes, and takes it away again."""
    line = None
    try:
        for node in NODES if one.rate else ():
            # So much may wait, as in a switch with a large buffer; more is dropped.
            rule = ["tbf", "rate", one.rate or "", "burst", "128kb", "latency", "20ms"]
            _in_network_of(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *rule)
        if one.delay_ms:
            line = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks/delay_line.py"), _pid("b"), str(one.delay_ms)],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            if line.stdout is None or not line.stdout.readline():
                raise TrainerError("the delay line does not start")
        yield
        if line is not None and line.poll() is not None:
            raise TrainerError("the delay line has ended before the measurement, which says nothing then")
    finally:
        if line is not None:
            line.terminate()
            line.wait()
        for node in NODES if one.rate else ():
            with suppress(TrainerError):  # where there is no rule yet, there is none to take away
                _in_network_of(node, "tc", "qdisc", "del", "dev", "eth0", "root")


def _in_network_of(node: str, *command: str) -> None:
    _output("nsenter", "--target", _pid(node), "--net", *command)


def _pid(node: str) -> str:
    container = _output("docker", "compose", "ps", "--format", "{{.Name}}", node).strip()
    if not container:
        raise TrainerError(f"node {node} does not run; start it with `docker compose up --build -d`")
    return _output("docker", "inspect", "--format", "{{.State.Pid}}", container).strip()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise TrainerError(f"{' '.join(command)} failed: {error}") from None


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", default=list(WIRES), metavar="LINK", help=f"of {', '.join(WIRES)}")
    parser.add_argument("--strategies", default="horovod,ring", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--json", type=Path, default=Path("shaped-link.json"), metavar="FILE", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if strange := [name for name in options.only if name not in WIRES]:
        raise ConfigError(f"--only has {strange[0]!r}; valid are {', '.join(WIRES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
