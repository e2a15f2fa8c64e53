"""A job of a tiny model, each of whose ranks writes what it cost to join, and what the ranks have compared.

It is started by benchmarks/join.py, with a folder for the ranks' figures.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch

import trainer
from trainer.cluster.world import current_world


def main(folder: Path) -> None:
    world = current_world("cpu")
    (folder / f"ready-{world.rank}").touch()
    while len(list(folder.glob("ready-*"))) < world.size:  # starting Python and importing PyTorch is no cost of ours
        time.sleep(0.1)
    began, cpu_began = time.monotonic(), time.process_time()
    run = trainer.init(device="cpu")
    figures = {"join s": time.monotonic() - began, "join CPU s": time.process_time() - cpu_began}
    sent: list[int] = []
    gather = run.strategy.all_gather_object

    def counted(value: Any) -> list[Any]:
        sent.append(len(pickle.dumps(value)))
        return gather(value)

    run.strategy.all_gather_object = counted  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(50)])
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.loader([torch.full((8,), float(rank)) for rank in range(world.size)], batch_size=1):
        run.backward(model(batch).sum())
        optimizer.step()
    figures |= {"checks": len(sent), "checks kB": sum(sent) * world.size / 1000}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
