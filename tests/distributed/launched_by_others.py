"""A training that the launchers of other libraries start in functions, on two ranks; each writes its weights.

python tests/distributed/launched_by_others.py elastic|accelerate FOLDER PORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def train(folder: str) -> int:
    """Train a step on data that differ between the ranks."""
    import torch

    import trainer

    run = trainer.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    run.backward(model(torch.tensor([[2.0 * run.rank + 3.0]])).sum())
    optimizer.step()
    weights = [float(value) for value in model.parameters()]
    Path(folder, f"weights-{run.rank}").write_text(json.dumps([run.world.launcher, *weights]))
    run.close()
    return int(run.rank)


def main(launcher: str, folder: str, port: str) -> None:
    """Start the training."""
    if launcher == "accelerate":
        from accelerate import notebook_launcher

        notebook_launcher(train, (folder,), num_processes=2, use_port=port)
    else:
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"rank": 0}, run_id="launched", max_restarts=0,
        )  # fmt: skip
        assert elastic_launch(config, train)(folder) == {0: 0, 1: 1}


if __name__ == "__main__":
    main(*sys.argv[1:])
