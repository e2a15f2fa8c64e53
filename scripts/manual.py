"""Builds the manual as a site with a search: `make docs` writes site/index.html, which works without a network.

    .venv/bin/python scripts/manual.py    # takes no options

README.md becomes the first page. A file outside docs/ that a page links to becomes a page with its text, so links are
written as they hold in the checkout. A broken link ends the build, and so does a page that would load something from
elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES, SITE = ROOT / "build" / "manual", ROOT / "site"
"""mkdocs.yml names them as the folders of the pages and of the site."""
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|embed|object)\b[^>]*?"
    r"\s(?:src|srcset|href|data|poster)=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)"
    r"|(class=\"[^\">]*\b(?:mermaid|glightbox)\b)"
)
"""What a browser loads from elsewhere for a page or a style; for some classes the theme's script does."""


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
    if built.returncode or "griffe: " in built.stdout:
        return built.returncode or 1
    for file in (file for file in SITE.rglob("*") if file.suffix in (".html", ".css")):
        if found := loaded_from_elsewhere(file.read_text()):
            raise SystemExit(f"manual.py: {file.relative_to(ROOT)} would load {found}, which is not in the site")
    print(f"the manual is in {(SITE / 'index.html').relative_to(ROOT)}, which a browser opens as a file")
    return 0


def loaded_from_elsewhere(text: str) -> str:
    """Return what a browser would load from elsewhere for an HTML or CSS file; empty for nothing. Links are nothing."""
    found = _LOADED.search(text)
    return next(filter(None, found.groups())) if found else ""


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
    if file.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(file.read_text())["cells"]]
        return "\n\n".join(text if kind == "markdown" else f"````python\n{text}\n````" for kind, text in cells)
    return f"# {name}\n\n````{file.suffix.removeprefix('.') or 'text'}\n{file.read_text()}\n````\n"


if __name__ == "__main__":
    sys.exit(main())
