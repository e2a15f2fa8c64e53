"""Two nodes in containers whose link is made slow: are scaling_test.py's predictions and promises kept?

    docker compose up --build -d
    python benchmarks/shaped_link.py          # as root, with Docker, tc and nsenter; half an hour

Each link is put between the running nodes a and b, scaling_test.py is run on 1x1 and 2x2 with --try-advice, and one
table says by how much the predictions of 2x2 and the promises were off. Rates are tc's token buckets on both nodes'
eth0. A delay is a wire of our own (delay_line.py), because not every kernel has netem.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.errors import ConfigError, TrainerError
from trainer.failure import report_failures
from trainer.results import check_writable, write_whole

ROOT = Path(__file__).resolve().parent.parent
NODES = ("a", "b")


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
    options = _parse_args()
    check_writable(options.json)
    found: dict[str, Any] = {}
    for name in options.only:
        with wire(WIRES[name]):
            found[name] = measure(name, WIRES[name], options)
        write_whole(options.json, json.dumps(found, indent=1) + "\n")
    print("\n".join(["", "| link | strategy | what | promised | measured | off by |", "|---|---|---|---|---|---|"]))
    for name, result in found.items():
        print("\n".join(lines(name, result)))
    return 0


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
    subprocess.run(["docker", "compose", "exec", "-T", "a", *command], cwd=ROOT, check=True)
    text = _output("docker", "compose", "exec", "-T", "a", "cat", f"{folder}/scaling.json")
    result: dict[str, Any] = json.loads(text)
    return result


def lines(name: str, result: dict[str, Any]) -> Iterator[str]:
    """The predictions of 2x2, then the promises."""
    for row in result["rows"]:
        if row["error"] is not None:
            guess, seen = row["predicted_samples_per_s"], row["measured"]["samples_per_s"]
            yield _line(name, row["strategy"], "2x2, samples/s", f"{guess:,.0f}", f"{seen:,.0f}", guess / seen)
    for tried in result["tried"]:
        gain, what = tried["promised"]["advice"]["gain"], " ".join(tried["options"])
        seen = tried["samples_per_s"] / tried["promised"]["base"]
        ratio = gain / seen if seen else float("nan")
        yield _line(name, tried["strategy"], what, f"{gain:.2f} ×", f"{seen:.2f} ×", ratio)


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
    finally:
        if line is not None:
            line.terminate()
            line.wait()
        for node in NODES if one.rate else ():
            _in_network_of(node, "tc", "qdisc", "del", "dev", "eth0", "root")


def _in_network_of(node: str, *command: str) -> None:
    subprocess.run(["nsenter", "--target", _pid(node), "--net", *command], check=True)


def _pid(node: str) -> str:
    container = _output("docker", "compose", "ps", "--format", "{{.Name}}", node).strip()
    if not container:
        raise TrainerError(f"node {node} does not run; start it with `docker compose up --build -d`")
    return _output("docker", "inspect", "--format", "{{.State.Pid}}", container).strip()


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def _line(name: str, strategy: str, what: str, promised: str, seen: str, ratio: float) -> str:
    return f"| {name} | {strategy} | {what} | {promised} | {seen} | {ratio - 1:+.0%} |"


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
