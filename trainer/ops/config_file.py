"""`--config job.toml` of `trainer run` and `trainer submit`: their options, and the command, from a file.

    command = "python train.py --epochs 90"

    [run]
    np = 4
    hosts = "a:2,b:2"
    take-back = true

    [submit]
    scheduler = "slurm"
    nodes = 2
    ranks-per-node = 2
    directive = ["--partition=gpu", "--exclusive"]

A key is the option's name without its dashes; a list repeats the option. The command line has the last word.
"""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

_TABLES = ("run", "submit")
_KEYS = {"np": "-np", "hosts": "-H"}
"""Options whose names say little; any other key is the name of a long option."""


@dataclass(frozen=True)
class ConfigFile:
    """What a file says of one subcommand."""

    words: tuple[str, ...]
    """Its options, as a command line has them; "scheduler" of `trainer submit` is the first word."""
    command: tuple[str, ...]
    """What each rank runs; empty where the file does not say so."""
    lines: dict[str, str]
    """Where each option stands, as in "job.toml, line 3"."""

    def locate(self, message: str) -> str:
        """Return an error's text with the place of the first option in it that the file has set."""
        for option, place in self.lines.items():
            if re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", message):
                return f"{place}: {message}"
        return message


def read_config(path: str, table: str, parser: argparse.ArgumentParser) -> ConfigFile:
    """Read the options of one subcommand.

    Args:
        path: of the file.
        table: "run" or "submit".
        parser: that of the subcommand, which knows the options.

    Raises:
        ConfigError: names the line of what is not valid.
    """
    try:
        text = Path(path).read_text()
        settings = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from None
    lines = _lines(text)

    def place(*key: str) -> str:
        return f"{path}, line {lines.get(key, 1)}"

    if unknown := settings.keys() - {"command", *_TABLES}:
        raise ConfigError(
            f"{place(name := min(unknown))}: {name!r} is not known; valid are command, [run] and [submit]"
        )
    command = settings.get("command", [])
    if isinstance(command, str):
        command = shlex.split(command)
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise ConfigError(f"{place('command')}: command is {command!r}; valid is a text, or a list of texts")
    options = settings.get(table, {})
    if not isinstance(options, dict):
        raise ConfigError(f"{place(table)}: {table} is {options!r}; valid is a table, [{table}]")
    words: list[str] = []
    places: dict[str, str] = {}
    for key, value in options.items():
        option = _KEYS.get(key, key if key == "scheduler" else f"--{key}")
        places[option] = place(table, key)
        try:
            made = _words(parser, option, value)
        except ConfigError as error:
            raise ConfigError(f"{places[option]}: {error}") from None
        words = [*made, *words] if option == "scheduler" else [*words, *made]
    return ConfigFile(tuple(words), tuple(command), places)


def _words(parser: argparse.ArgumentParser, option: str, value: Any) -> list[str]:
    """Return a setting as words of a command line.

    Raises:
        ConfigError: there is no such option, or it takes no such value.
    """
    key = option.lstrip("-") if option not in _KEYS.values() else next(k for k, v in _KEYS.items() if v == option)
    actions = {name: action for action in parser._actions for name in action.option_strings or [action.dest]}
    if option not in actions or key in ("help", "config", "command", "h"):
        skipped = ("--help", "--config")
        valid = [name.removeprefix("--") for name in actions if name.startswith("--") and name not in skipped]
        valid += [key for key, name in _KEYS.items() if name in actions] + ["scheduler"] * ("scheduler" in actions)
        raise ConfigError(f"{key!r} is not known; valid are {', '.join(sorted(valid))}")
    action = actions[option]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; valid is true or false")
        return [option] if value else []
    values = value if isinstance(value, list) else [value]
    if isinstance(value, bool) or any(isinstance(entry, dict | list) for entry in values):
        raise ConfigError(f"{key} is {value!r}; valid is a number or a text")
    for entry in values:
        if callable(action.type):
            try:
                action.type(str(entry))
            except ValueError:
                raise ConfigError(f"{key} is {entry!r}; valid is a number") from None
    if option == "scheduler":
        return [str(entry) for entry in values]
    return [
        word
        for entry in values
        for word in ([f"{option}={entry}"] if option.startswith("--") else [option, str(entry)])
    ]


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
