"""Progress and record of a loop of one's own; run on every rank of one job."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from trainer import TrainerError, init
from trainer.strategies.base import Strategy


def check_a_record_is_rank_0s_and_every_rank_knows_its_folder(strategy: Strategy) -> None:
    run = init(strategy)
    parent = Path(run.broadcast(tempfile.mkdtemp(prefix="trainer-record-") if run.is_root else None))
    # What another rank asks for does not count.
    folder = run.record(parent / f"of-rank-{run.rank}", settings={"rank": run.rank})
    assert folder == parent / "of-rank-0"
    run.log({"rank": float(run.rank), "ranks": run.all_reduce(1, "sum")}, step=7)
    run.barrier()
    assert [path.name for path in parent.iterdir()] == ["of-rank-0"]
    assert json.loads((folder / "settings.json").read_text())["settings"] == {"rank": 0}
    (line,) = (folder / "steps.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["step"], entry["rank"], entry["ranks"]) == (7, 0.0, float(run.world_size))
    run.barrier()
    with pytest.raises(TrainerError, match=r"of-rank-0 already holds a run"):  # on every rank
        run.record(folder)
    if run.is_root:
        shutil.rmtree(parent)
