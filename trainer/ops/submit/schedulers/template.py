"""Templates of job files: a shell script or a manifest with names in place of values, as in `--nodes=__nodes__`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from textwrap import indent

from trainer.cluster.exit_codes import MISTAKE, PREEMPTED

_NAME = re.compile(r"__([A-Za-z](?:[A-Za-z_.]*?[A-Za-z])?)__")
_COMMENT = re.compile(r" *# ")


def read(path: str) -> str:
    """Return the text of a file of `trainer/ops/submit/`."""
    return files("trainer.ops.submit").joinpath(path).read_text(encoding="utf-8")


def read_requeue() -> str:
    """Return `requeue.py` as a program that needs no trainer: with the exit codes in place of their import."""
    codes = f"MISTAKE, PREEMPTED = {MISTAKE}, {PREEMPTED}\n"
    return re.sub(r"^from trainer\.cluster\.exit_codes import .*\n", codes, read("requeue.py"), flags=re.MULTILINE)


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return a template with values in place of their names.

    A line with a value of None is left out, together with the comment right above it. A line with a tuple is repeated
    for each of its items. A value whose name stands alone on its line is indented like the name.
    """
    lines: list[str] = []
    for line in template.splitlines():
        names = _NAME.findall(line)
        if any(values[name] is None for name in names):
            while lines and _COMMENT.match(lines[-1]):
                lines.pop()
        elif [f"__{name}__" for name in names] == [line.strip()]:
            lines.append(indent(str(values[names[0]]).rstrip("\n"), line[: line.index("__")]))
        else:
            lines += _filled(line, names, values)
    return "".join(f"{line}\n" for line in lines)


def _filled(line: str, names: list[str], values: Mapping[str, object]) -> list[str]:
    for name in names:
        items = values[name]
        if isinstance(items, tuple):
            return [each for item in items for each in _filled(line, names, {**values, name: item})]
    return [_NAME.sub(lambda match: str(values[match[1]]), line)]
