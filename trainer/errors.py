"""Errors that a user can mend; the text of each is the whole message."""

import re


class TrainerError(Exception):
    """A mistake or failure that its one line explains; shown without a traceback."""


class ConfigError(TrainerError, ValueError):
    """A setting has a value that is not valid; the text names it, and what is valid."""


class DataError(TrainerError):
    """A data file is missing, damaged, or does not fit the others."""


class LaunchError(TrainerError):
    """The ranks of `trainer.launch` have failed, and no exception of the function says why."""


_RANK = re.compile(r"rank (\d+) on host ")


def name_rank(message: str, rank: int, size: int, host: str) -> str:
    """Begin a message with the rank that it comes from, unless there is only one or it names one already."""
    return message if size == 1 or _RANK.match(message) else f"rank {rank} on host {host}: {message}"


def named_ranks(message: str) -> list[int]:
    """Return the ranks that a message names with their hosts: whose error it is, on whichever rank it was raised."""
    return [int(number) for number in _RANK.findall(message)]
