"""The script of docs/trace.md: torch.profiler on two ranks shows what the library does within a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.pages import units
from tests.distributed.snippets import in_shell
from trainer.watch.spans import EXCHANGE, LOADER, WAIT

STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["horovodrun -np 2 python", "torchrun --nproc-per-node 2"])
def test_a_profiler_shows_what_the_library_does(launcher: str, tmp_path: Path) -> None:
    (script,) = (unit.text for unit in units("python") if unit.page == "docs/trace.md")
    (tmp_path / "train.py").write_text(script)
    outcome = in_shell(tmp_path, f"{launcher} train.py")
    assert outcome.code == 0, outcome.output
    of_all = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        alone = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        for name in (LOADER, EXCHANGE, WAIT):
            assert [event["name"] for event in alone if event["ph"] == "X"].count(name) == STEPS, name
            both = [event for event in of_all if event["name"] == name and event["pid"].startswith(f"rank {rank},")]
            assert len(both) == STEPS, name
