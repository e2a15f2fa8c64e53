"""`--config job.toml` of `trainer run`: its options, and the command, from a file.

    command = "python train.py --epochs 90"

    [run]
    np = 4
    hosts = "a:2,b:2"
    take-back = true

A key is the option's name without its dashes. The command line has the last word.
"""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

_TABLE = "run"
_KEYS = {"-np": "np", "-H": "hosts"}
"""Keys of the options that have no long name."""
_NO_SETTINGS = ("help", "config", "command")
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 100
_MOST_NUMBER = 1 << 63
"""TOML promises integers below this. Python writes none of more than 4,300 digits."""


@dataclass(frozen=True)
class ConfigFile:
    """What a file says."""

    words: tuple[str, ...]
    """The options, as a command line has them."""
    command: tuple[str, ...]
    """What each rank runs; empty where the file does not say so."""
    places: Mapping[str, str]
    """Where each option stands, as in "job.toml, line 3"."""

    def locate(self, message: str, typed: Sequence[str]) -> str:
        """Return an error's text with the place of the option in it that the file has set.

        Args:
            message: the error's text.
            typed: the words of the command line, whose options count more than the file's.
        """
        for option, place in self.places.items():
            is_typed = any(word == option or word.startswith(f"{option}=") for word in typed)
            if not is_typed and re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", message):
                return f"{place}: {message}"
        return message


def read_config(path: str, parser: argparse.ArgumentParser) -> ConfigFile:
    """Read the options of `trainer run`.

    Args:
        path: of the file.
        parser: that of `trainer run`, which knows the options.

    Raises:
        ConfigError: names the line of what is not valid.
    """
    text, settings = _read(path)
    lines, actions = _lines(text), _actions(parser)
    words: list[str] = []
    command: list[str] = []
    places: dict[str, str] = {}
    for keys, value in _entries(settings):
        place = f"{path}, line {lines.get(keys) or lines.get(keys[:1], 1)}"
        try:
            if keys == ("command",):
                command = _command(value)
                continue
            action = _action(keys, actions, value)
            made = _words(keys[-1], value, action)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        words += made
        places[action.option_strings[0]] = place
    return ConfigFile(tuple(words), tuple(command), places)


def _read(path: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a file, and what it says."""
    try:
        with Path(path).open("rb") as file:  # which may be a pipe
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"--config {path} is larger than {_MOST_BYTES:,} bytes")
        text = data.decode()
        settings = tomllib.loads(text)
        _check_numbers(settings)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:  # TOMLDecodeError, which names the line; or bytes that are no text
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from None
    return text, settings


def _check_numbers(value: Any, depth: int = 0) -> None:
    """Raise `RecursionError` or `ValueError` for a value that no message can show."""
    if depth > _MOST_DEPTH:
        raise RecursionError
    if isinstance(value, int) and not -_MOST_NUMBER <= value < _MOST_NUMBER:
        raise ValueError("a number has more than 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(inner, depth + 1)


def _entries(settings: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each setting by its key, behind that of its table; and whatever is no known table."""
    for key, value in settings.items():
        if key == _TABLE and isinstance(value, dict):
            yield from (((key, name), entry) for name, entry in value.items())
        else:
            yield (key,), value


def _command(value: Any) -> list[str]:
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"command is {value!r}, which a shell cannot read: {error}") from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"command is {value!r}; valid is a text, or a list of texts")
    return words


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options that a file may set, by their long names without dashes."""
    actions = {}
    for action in parser._actions:
        long_names = [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
        key = long_names[0] if long_names else _KEYS.get("".join(action.option_strings[:1]), action.dest)
        if key not in _NO_SETTINGS:
            actions[key] = action
    return actions


def _action(keys: tuple[str, ...], actions: Mapping[str, argparse.Action], value: Any) -> argparse.Action:
    """Return what a key sets."""
    if keys[0] != _TABLE:
        raise ConfigError(f"{keys[0]!r} is not known; valid are command and [run]")
    if len(keys) == 1:
        raise ConfigError(f"{keys[0]} is {value!r}; valid is a table, [{keys[0]}]")
    if keys[1] not in actions:
        raise ConfigError(f"{keys[1]!r} is not known; valid are {', '.join(sorted(actions))}")
    return actions[keys[1]]


def _words(key: str, value: Any, action: argparse.Action) -> list[str]:
    """Return a setting as words of a command line."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; valid is true or false")
        return [action.option_strings[0]] if value else []
    if isinstance(value, bool | dict | list):
        raise ConfigError(f"{key} is {value!r}; valid is a number or a text")
    if callable(action.type):
        try:
            action.type(str(value))
        except ValueError:
            raise ConfigError(f"{key} is {value!r}; valid is a number") from None
    option = action.option_strings[0]
    if option.startswith("--"):
        return [f"{option}={value}"]  # a value may begin with a dash
    return [option, str(value)]  # options with a single dash take no "="


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of each key, and of each table."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\s*([\w-]+)\s*\]", line):
            table = (match[1],)
            lines.setdefault(table, number)
        elif match := re.match(r"""\s*["']?([\w-]+)["']?\s*=""", line):
            lines.setdefault((*table, match[1]), number)
    return lines
