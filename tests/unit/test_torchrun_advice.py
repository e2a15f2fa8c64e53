"""What pages, examples, job files and messages say of torchrun: never the rendezvous whose store runs code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# docs/security.md says why not, and CHANGELOG.md that it has changed.
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "security.md")]
OTHERS = [
    path
    for folder in ("examples", "jobs", "trainer")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix != ".pyc"
]
OPENED = re.compile(r"--standalone|--rdzv[-_](?:endpoint|backend\b(?!\W+static))")
BREAK = re.compile(r'\\\n *|"\n *f?"')  # within a command, and within a string of Python's
ADDRESS = ("--node-rank", "--master-addr", "--master-port")


def is_refused(text: str) -> bool:
    text = BREAK.sub("", text)
    nodes = re.findall(r"torchrun --nnodes .+", text)
    return bool(OPENED.search(text)) or any(option not in command for command in nodes for option in ADDRESS)


def test_nothing_advises_a_store_that_runs_code() -> None:
    texts = {path: path.read_text(errors="replace") for path in (*PAGES, *OTHERS)}
    assert [path for path, text in texts.items() if is_refused(text) or (path in PAGES and "c10d" in text)] == []


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --standalone train.py",
        "torchrun --nnodes 2 --node-rank 0 train.py",
        "torchrun --nnodes 2 --node-rank 0 --master-addr a --master-port 29500 --rdzv-backend etcd train.py",
        "torchrun --rdzv_endpoint=a:29500 train.py",
        "torchrun --rdzv-backend=etcd-v2 train.py",
    ],
)
def test_such_an_advice_would_be_seen(command: str) -> None:
    assert is_refused(command)
