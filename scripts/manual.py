"""Builds the manual as a site with a search: `make docs` writes site/index.html, which works without a network.

    .venv/bin/python scripts/manual.py    # takes no options

README.md becomes the first page. A file outside docs/ that a page links to becomes a page with its text, so links are
written as they hold in the checkout. A broken link ends the build.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "manual"
"""mkdocs.yml names it as the folder of the pages."""
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def main() -> int:
    """Write the pages, and build the site from them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    sources = {Path("index.md"): ROOT / "README.md"} | {path.relative_to(DOCS): path for path in DOCS.rglob("*.md")}
    outside: set[Path] = set()
    for page, source in sources.items():
        text, linked = _with_links_of_the_site(page, source)
        (PAGES / page).write_text(text)
        outside |= linked
    (PAGES / "files").mkdir()
    for file in outside:
        (PAGES / _page_of(file)).write_text(_show(file))
    build = [str(Path(sys.executable).parent / "zensical"), "build", "--clean", "--strict"]
    built = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(built.stdout, end="")
    # --strict lets pass what is wrong in a docstring: griffe, which reads them, only warns.
    return built.returncode or int("griffe: " in built.stdout)


def _with_links_of_the_site(page: Path, source: Path) -> tuple[str, set[Path]]:
    """Return a page's text with links that hold in the site, and the files outside docs/ that it links to."""
    outside = set()

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match["target"]).resolve()
        if target == ROOT / "README.md":
            name = "index.md"
        elif target.is_relative_to(DOCS):
            name = str(target.relative_to(DOCS))
        else:
            outside.add(target)
            name = _page_of(target)
        text = _title(target) if match["text"].endswith(".md") else match["text"]
        return f"[{text}]({'../' * (len(page.parts) - 1)}{name}{match['anchor'] or ''})"

    return _LINK.sub(link, source.read_text()), outside


def _title(file: Path) -> str:
    """Return a page's heading, or the name of any other file."""
    return file.read_text().split("\n", 1)[0].removeprefix("# ") if file.suffix == ".md" else file.name


def _page_of(file: Path) -> str:
    """Return the name of the page that shows a file of the checkout."""
    return f"files/{'-'.join(file.relative_to(ROOT).parts).removesuffix('.md')}.md"


def _show(file: Path) -> str:
    """Return a page with a file's text, or with the names in a folder."""
    name = file.relative_to(ROOT)
    if file.is_dir():
        return "\n".join([f"# {name}/", "", *(f"* `{entry.name}`" for entry in sorted(file.iterdir())), ""])
    if not file.is_file():
        raise SystemExit(f"manual.py: a page links to {name}, which is not there")
    if file.suffix == ".md":
        return file.read_text()
    return f"# {name}\n\n````{file.suffix.removeprefix('.') or 'text'}\n{file.read_text()}\n````\n"


if __name__ == "__main__":
    sys.exit(main())
