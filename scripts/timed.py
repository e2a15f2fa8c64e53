"""Run a training script as it is, and write down where the time of its steps goes.

    python scripts/timed.py t.jsonl examples/mnist.py --epochs 1
    horovodrun -np 2 python scripts/timed.py --steps 40 t.jsonl examples/mnist.py --epochs 1
    python scripts/timed.py t.jsonl -m package.module

Rank 0 appends a line of JSON for each epoch (`EpochTiming` of scripts/scaling). scripts/scaling_test.py runs it so.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from functools import partial
from pathlib import Path

from scaling.timed_strategy import timed

from trainer import strategies


def main() -> None:
    options = _parse_args()
    strategies.wrapper = partial(timed, file=options.file, steps=options.steps, exchanges=options.exchange)
    name, *arguments = options.script
    if name == "-m" and arguments:
        sys.path[0], sys.argv = "", arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(name).resolve().parent), options.script
        runpy.run_path(name, run_name="__main__")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=_positive, metavar="N", help="end an epoch after N steps, and the warm-up")
    parser.add_argument(
        "--no-exchange", dest="exchange", action="store_false", help="leave each rank its own gradients"
    )
    parser.add_argument("file", type=Path, help="gets a line of JSON per epoch")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the training script and its arguments")
    options = parser.parse_args()
    if not options.script:
        parser.error("which script is to be timed?")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; valid is a positive number of steps")
    return int(text)


if __name__ == "__main__":
    main()
