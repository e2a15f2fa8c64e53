"""A job that shows its ports: it says that it is ready on every rank, and waits.

`python job_that_waits.py STRATEGY`. It goes on when the file that WAIT_FOR names exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def wait() -> None:
    """Say that this rank is ready, and wait."""
    print("ready", flush=True)
    while not Path(os.environ["WAIT_FOR"]).exists():
        time.sleep(0.05)


def wait_in_training(strategy: str) -> None:
    """Wait after one update."""
    import torch

    import trainer
    from examples.strategies import full_name

    run = trainer.init(full_name(strategy))
    model = torch.nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    print(f"interface of Gloo: {os.environ.get('GLOO_SOCKET_IFNAME')}.", flush=True)
    wait()
    run.barrier()


if __name__ == "__main__":
    wait_in_training(sys.argv[1])
