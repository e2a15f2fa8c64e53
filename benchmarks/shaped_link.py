"""Checks scaling_test.py's predictions between two containers, on their link as it is and made slow.

    docker compose up --build -d
    python benchmarks/shaped_link.py          # as root, with Docker, tc and nsenter; three quarters of an hour
    python benchmarks/shaped_link.py --networks language_model --strategies ddp,horovod     # twenty minutes

For each link between the running nodes a and b, scaling_test.py runs on 1x1 and 2x2 with --try-advice. The networks are
that of examples/mnist.py with 25 MB of gradients (0.4 MB on the long link), and the transformer of
examples/language_model.py with 4.3 MB, in batches of 4 so that the exchange shows. One table shows
the errors of the predictions for 2x2 and of the predicted gains of its advice. The exit code is 1 when an error is
above a fifth, or when something could not be measured. Rates are tc's token buckets on both nodes' eth0. Delays are
made by delay_line.py, because not every kernel has netem.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.links import LINKS, ON_A, ROOT, check_links, output, shaped
from trainer.errors import ConfigError
from trainer.files import check_writable, write_atomically
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.watch.failure import report_failures

TOLERANCE = 0.2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained on a link."""

    steps: int
    script: tuple[str, ...]
    """With its options."""
    options: tuple[str, ...] = ()
    """Options of scaling_test.py."""


def _mnist(steps: int, network: str = "large") -> Job:
    options = ("--network", network, "--epochs", "1", "--output", "none", "--lr", "0.001")
    return Job(steps=steps, script=("examples/mnist.py", *options))


def _language_model(steps: int) -> Job:
    script = ("examples/language_model.py", "--length", "128", "--bytes", "400000")
    return Job(steps=steps, script=script, options=("--batch-size", "4", "--global-batch"))


JOBS = {
    "mnist": {
        "unlimited": _mnist(40),
        "1gbit": _mnist(40),
        "100mbit": _mnist(10),
        "20ms": _mnist(20, network="default"),
    },
    "language_model": {
        "unlimited": _language_model(40),
        "1gbit": _language_model(40),
        "100mbit": _language_model(20),
        "20ms": _language_model(20),
    },
}
"""By network and link."""


def main() -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    options = _parse_args()
    check_writable(options.json)
    found: dict[str, Any] = {}
    for link, network in product(options.only, options.networks):
        name = f"{link}, {network}"
        with shaped(LINKS[link]):
            found[name] = measure(name, JOBS[network][link], options)
        write_atomically(options.json, json.dumps(found, indent=1) + "\n")
    errors = [one for name, result in found.items() for one in compare(name, result)]
    head = ["", "| link, network | strategy | value | predicted | measured | error |", "|---|---|---|---|---|---|"]
    print("\n".join([*head, *map(str, errors)]))
    within = [one for one in errors if abs(one.error) <= TOLERANCE]
    print(f"\n{len(within)} of {len(errors)} within {TOLERANCE:.0%}")
    failed = [f"{name}: {problem}" for name, result in found.items() for problem in result["problems"]]
    print("\n".join(failed))
    return int(len(within) < len(errors) or bool(failed) or not errors)


def measure(name: str, one: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Run the scaling test on node a; return its JSON."""
    folder = f"runs/shaped-{name.replace(', ', '-')}"
    command = [
        *["python", "scripts/scaling_test.py", "--hosts", "a:2,b:2", "--shapes", "1x1,2x2", "--scaling", "weak"],
        *["--strategies", options.strategies, "--steps", str(one.steps), "--repeats", str(options.repeats)],
        *[*one.options, "--try-advice", "--output", folder, *one.script],
    ]
    print(f"{time.strftime('%H:%M:%S')} {name}: {' '.join(command)}", file=sys.stderr, flush=True)
    output(*ON_A, "rm", "-rf", folder)  # the results of an earlier run
    try:
        ended = subprocess.run([*ON_A, *command], cwd=ROOT, check=False)
    except KeyboardInterrupt:  # which reaches only the client
        output(*ON_A, "pkill", "-f", "scaling_test.py")
        raise
    result: dict[str, Any] = json.loads(output(*ON_A, "cat", f"{folder}/scaling.json"))
    if ended.returncode and not result["problems"]:
        result["problems"].append(f"scaling_test.py ended early, with code {ended.returncode}")
    return result


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted value and the measured one."""

    where: str
    """The link and the network."""
    strategy: str
    value: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return the error relative to the measured value; infinite where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else math.inf

    def __str__(self) -> str:
        numbers = (f"{self.predicted:,.4g}", f"{self.measured:,.4g}", f"{self.error:+.0%}")
        cells = (self.where, self.strategy, self.value, *numbers)
        return f"| {' | '.join(cells)} |"


def compare(name: str, result: dict[str, Any]) -> Iterator[Prediction]:
    """Yield the predictions for 2x2, then the predicted gains of the advice."""
    for row in result["rows"]:
        if row["error"] is not None:
            guess, seen = row["predicted_samples_per_s"], row["measured"]["samples_per_s"]
            yield Prediction(
                where=name, strategy=row["strategy"], value="2x2, samples/s", predicted=guess, measured=seen
            )
    for tried in result["tried"]:
        gain, option = tried["promised"]["advice"]["gain"], " ".join(tried["options"])
        seen = tried["samples_per_s"] / tried["promised"]["base"]
        yield Prediction(where=name, strategy=tried["strategy"], value=f"{option}, ×", predicted=gain, measured=seen)


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", default=list(LINKS), metavar="LINK", help=f"of {', '.join(LINKS)}")
    parser.add_argument("--networks", nargs="+", default=["mnist"], metavar="NAME", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--strategies", default="horovod,ring", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--json", type=Path, default=Path("shaped-link.json"), metavar="FILE", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    check_links(options.only)
    if strange := [name for name in options.networks if name not in JOBS]:
        raise ConfigError(f"--networks has {strange[0]!r}; valid are {', '.join(JOBS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
