"""Progress and record of a loop of one's own; run on every rank of one job."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from trainer import InMemory, TrainerError, init
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


def check_progress_takes_every_rank_through_the_same_steps(strategy: Strategy) -> None:
    run = init(strategy)
    samples = 3 * run.world_size + 1
    data = InMemory(torch.arange(float(samples)), torch.zeros(samples))
    watched, plain = (run.loader(data, 1, shuffle=False) for _ in range(2))
    for _ in run.epochs(2):
        seen = [(inputs.tolist(), run.batch_samples) for inputs, _ in run.progress(watched)]
        assert seen == [(inputs.tolist(), run.batch_samples) for inputs, _ in plain]
        assert run.all_gather(len(seen)) == [4] * run.world_size
