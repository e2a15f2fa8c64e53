"""Draws the pictures of docs/results.md from the page's own tables: a group of bars for each row.

    python benchmarks/pictures.py

The columns whose heading ends with ", s" are drawn, each row on a scale of its own, by the number that a cell
begins with. A row with less than two such numbers compares nothing and is left out.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results.md"
_WITH_PICTURE = re.compile(r"((?:^\|.*\n)+)\n!\[[^\]]*\]\((pictures/[\w-]+\.svg)\)", re.MULTILINE)
_WIDTH, _LONGEST, _BAR, _LABEL = 550, 230, 18, 26
_COLOURS = {"ours": "#3b82f6", "limi": "#9ca3af"}
"""By the first letters of a column's heading; peers have another one."""


def of_page(page: str) -> dict[str, str]:
    """Return the pictures that belong to a page's tables, by their path from the page."""
    return {path: draw(table) for table, path in _WITH_PICTURE.findall(page)}


def draw(table: str) -> str:
    """Return a table in Markdown as bars, in SVG."""
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    y, parts = 6, []
    for row in rows:
        bars = [
            (name.removesuffix(", s"), cell.replace(number[0], f"{number[0]} s", 1), float(number[0]))
            for name, cell in zip(head[1:], row[1:], strict=True)
            if name.endswith(", s") and (number := re.match(r"[\d.]+", cell))
        ]
        if len(bars) < 2:
            continue
        parts.append(f'<text x="8" y="{y + 15}" font-weight="bold">{escape(row[0].replace("`", ""))}</text>')
        y += _LABEL
        for name, cell, value in bars:
            width, colour = _LONGEST * value / max(value for *_, value in bars), _COLOURS.get(name[:4], "#f59e0b")
            parts.append(
                f'<rect x="8" y="{y}" width="{width:.1f}" height="{_BAR - 3}" fill="{colour}"/>'
                f'<text x="{width + 14:.1f}" y="{y + 12}">{escape(f"{name}: {cell}")}</text>'
            )
            y += _BAR
        y += 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" role="img" '
        f'aria-label="{head[0]}" font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#1f2937">\n'
        f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> int:
    """Write the pictures of the page."""
    for path, text in of_page(PAGE.read_text()).items():
        (PAGE.parent / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
