"""The code blocks of README.md and docs/*.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.distributed.harness import ROOT

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


@dataclass(frozen=True)
class Unit:
    """A Python, diff, YAML, Dockerfile or text block."""

    page: str
    line: int
    kind: str
    """The block's language."""
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.kind}: {self.text.splitlines()[0]}"


def units(kind: str) -> list[Unit]:
    """Return all blocks of the pages in one language."""
    return [unit for page in PAGES for unit in _read_page(page) if unit.kind == kind]


def launching_units() -> list[Unit]:
    """Return the Python blocks that start ranks themselves; a launcher starts none of them."""
    return [unit for unit in units("python") if "trainer.launch(" in unit.text and "import optuna" not in unit.text]


def _read_page(page: str) -> Iterator[Unit]:
    lines, number = (ROOT / page).read_text().split("\n"), 0
    while number < len(lines):
        begin, line = number, lines[number]
        number += 1
        if line.startswith("```"):
            number = lines.index("```", number)
            yield Unit(page, begin + 1, line.removeprefix("```"), "\n".join(lines[begin + 1 : number]))
            number += 1
