"""A training script for `test_supervise`: one rank ends in a given way after a given update, in the first attempts.

It writes its progress to a JSON file, as the simplest checkpoint, and goes on from there.

Usage: job_that_is_killed.py KIND [--rank 1] [--update 20] [--times 1] [--updates 60]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import trainer
from trainer.files import write_atomically

_SAVED = Path("progress.json")
_SAVE_EVERY = 10


def end(kind: str) -> None:
    """End this rank."""
    if kind in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), signal.Signals[kind])
        time.sleep(60)
    if kind == "mistake":
        raise trainer.ConfigError("momentum is 2; valid is 0 to 1")
    if kind == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    for name, default in (("--rank", 1), ("--update", 20), ("--times", 1), ("--updates", 40)):
        parser.add_argument(name, type=int, default=default)
    return parser.parse_args()


def main() -> None:
    options = parse()
    run = trainer.init(device="cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 3)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved = json.loads(_SAVED.read_text()) if _SAVED.exists() else {"update": 0, "starts": 0}
    run.barrier()
    run._updates.completed = update = saved["update"]
    state = {**saved, "starts": saved["starts"] + 1}
    if run.is_root:
        write_atomically(_SAVED, json.dumps(state))
    dataset = trainer.InMemory(torch.randn(options.updates * 8, 20), torch.randint(3, (options.updates * 8,)))
    loader = run.loader(dataset, global_batch_size=8)
    for inputs, targets in loader:
        optimizer.zero_grad()
        run.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        update += 1
        time.sleep(0.02)
        if run.is_root and update % _SAVE_EVERY == 0:
            write_atomically(_SAVED, json.dumps({**state, "update": update}))
        if update == options.update and run.rank == options.rank and state["starts"] <= options.times:
            end(options.kind)
        if update == options.updates:
            break
    run.print(f"trained {update} updates in start {state['starts']}")


if __name__ == "__main__":
    main()
