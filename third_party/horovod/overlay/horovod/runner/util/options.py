"""How horovodrun reads its options: no abbreviations, mistakes in a line, and none of elastic jobs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from horovod.runner.util import closed

_OF_ELASTIC_JOBS = (
    ("--min-np", "--min-num-proc"),
    ("--max-np", "--max-num-proc"),
    ("--slots-per-host",),
    ("--elastic-timeout",),
    ("--reset-limit",),
    ("--blacklist-cooldown-range",),
    ("--host-discovery-script",),
)


class Parser(argparse.ArgumentParser):
    """Expands no abbreviations: it would do so in the whole command line, the training script's arguments included."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(prog="horovodrun", allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        # Without the usage, of which there is a page.
        message = re.sub(r"invalid int value: ('.*')", r"\1 is no whole number", message)
        self.exit(2, f"horovodrun: {message}; horovodrun --help says what is valid\n")


class _Refused(argparse.Action):
    """Ends the command where it meets the option, whether a value follows or not."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        parser.exit(2, f"horovodrun: {closed.message(str(option_string))}\n")


def refuse_elastic(parser: argparse.ArgumentParser) -> None:
    """Have a parser refuse the options of elastic jobs, each by its name."""
    for names in _OF_ELASTIC_JOBS:
        parser.add_argument(*names, action=_Refused, dest=argparse.SUPPRESS)
