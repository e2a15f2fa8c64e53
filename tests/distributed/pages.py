"""The code blocks and commands of README.md and docs/*.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.distributed.harness import ROOT

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

_PROGRAMS = "python|horovodrun|mpirun|srun|torchrun|make|docker|source|printf|pip|git|ssh|sh|bash|apt-get"
_OURS = "trainer(?! (?:run|doctor):)"  # with a colon it is what the command prints
IS_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{_PROGRAMS}|{_OURS}) \S")


@dataclass(frozen=True)
class Unit:
    """A Python, diff, YAML, Dockerfile or text block, or a single command."""

    page: str
    line: int
    kind: str
    """The block's language, or "command"."""
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.kind}: {self.text.splitlines()[0]}"


def units(kind: str | None = None) -> list[Unit]:
    """Return all blocks and commands of the pages, or those of one kind."""
    found = [unit for page in PAGES for unit in read_page(page, (ROOT / page).read_text())]
    return [unit for unit in found if kind in (None, unit.kind)]


def launching_units() -> list[Unit]:
    """Return the Python blocks that start ranks themselves; a launcher starts none of them."""
    return [unit for unit in units("python") if "trainer.launch(" in unit.text]


def read_page(page: str, text: str) -> Iterator[Unit]:
    """Yield the fenced blocks, the commands in indented blocks, and the commands in running text and tables."""
    lines, number = text.split("\n"), 0
    while number < len(lines):
        begin, line = number, lines[number]
        number += 1
        if line.startswith("```"):
            number = lines.index("```", number)
            yield Unit(page, begin + 1, line.removeprefix("```") or "no language", "\n".join(lines[begin + 1 : number]))
            number += 1
        elif line.startswith("    ") and line.strip():
            while line.endswith("\\") or line.endswith("|"):
                line = f"{line.removesuffix(chr(92)).rstrip()} {lines[number].strip()}"
                number += 1
            yield Unit(page, begin + 1, "command", _plain(line))
        elif line.strip():
            # A code span may go over the end of a line, in a paragraph but not in a table.
            while not line.startswith("|") and lines[number].strip() and not lines[number].startswith(("|", "`" * 3)):
                line = f"{line} {lines[number].strip()}"
                number += 1
            for span in re.findall(r"`([^`]+)`", line):
                if IS_COMMAND.match(span):
                    yield Unit(page, begin + 1, "command", _plain(span))


def _plain(command: str) -> str:
    """Return a command without its comment and without `docker compose exec a` in front."""
    return re.sub(r"\s{2,}# .*", "", command).strip().removeprefix("docker compose exec a ")
