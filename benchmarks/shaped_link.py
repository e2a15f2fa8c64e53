"""Check scaling_test.py's predictions between two containers, on their link as it is and made slow.

    docker compose up --build -d
    python benchmarks/shaped_link.py          # as root, with Docker, tc and nsenter; half an hour

For each link between the running nodes a and b, scaling_test.py runs on 1x1 and 2x2 with --try-advice. The network is
that of examples/mnist.py with 25 MB of gradients (0.4 MB on the long link). One table shows the errors of the
predictions for 2x2 and of the predicted gains of its advice. The exit code is 1 when an error is above a fifth, or when
something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.links import LINKS, ON_A, ROOT, output, shaped
from measuring import INTERRUPTS, interrupt_on, parser_of
from trainer.watch.failure import report_failures

TOLERANCE = 0.2
JOBS = {"unlimited": (40, "large"), "1gbit": (40, "large"), "100mbit": (10, "large"), "20ms": (20, "default")}
"""Steps, and the network of examples/mnist.py, on each link."""


def main() -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    options = _parse_args()
    rows, problems, missed = ["| link | strategy | value | predicted | measured | error |", "|---" * 6 + "|"], [], 0
    for link in options.only:
        with shaped(link):
            result = measure(link, options.strategies)
        problems += [f"{link}: {problem}" for problem in result["problems"]]
        for strategy, value, predicted, measured in compare(result):
            error = predicted / measured - 1 if measured else math.inf
            missed += abs(error) > TOLERANCE
            rows.append(f"| {link} | {strategy} | {value} | {predicted:,.4g} | {measured:,.4g} | {error:+.0%} |")
    print("\n".join([*rows, f"\n{missed} off by more than {TOLERANCE:.0%}", *problems]))
    return int(bool(missed or problems or len(rows) == 2))


def measure(link: str, strategies: str) -> dict[str, Any]:
    """Run the scaling test on node a; return its JSON."""
    folder, (steps, network) = f"runs/shaped-{link}", JOBS[link]
    command = [
        *["python", "scripts/scaling_test.py", "--hosts", "a:2,b:2", "--shapes", "1x1,2x2", "--scaling", "weak"],
        *["--strategies", strategies, "--steps", str(steps), "--repeats", "1", "--try-advice", "--output", folder],
        *["examples/mnist.py", "--network", network, "--epochs", "1", "--output", "none", "--lr", "0.001"],
    ]
    print(f"{time.strftime('%H:%M:%S')} {link}: {' '.join(command)}", file=sys.stderr, flush=True)
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


def compare(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Yield strategy, name, prediction and measurement: of samples/s on 2x2, then of the gain of each advice."""
    for row in result["rows"]:
        if row["error"] is not None:
            seen = row["measured"]["samples_per_s"]
            yield row["strategy"], "2x2, samples/s", row["predicted_samples_per_s"], seen
    for tried in result["tried"]:
        seen = tried["samples_per_s"] / tried["promised"]["base"]
        yield tried["strategy"], f"{' '.join(tried['options'])}, ×", tried["promised"]["advice"]["gain"], seen


def _parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=list(LINKS), choices=LINKS, help="links (default: all)")
    parser.add_argument("--strategies", default="ddp", metavar="LIST", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
