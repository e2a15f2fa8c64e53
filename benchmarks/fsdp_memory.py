"""Bytes that each rank keeps between two steps, and how much memory a step takes, under one strategy.

torchrun --nproc-per-node 4 benchmarks/fsdp_memory.py --size 10m --strategy fsdp

Counted are the tensors that this rank holds after a step of AdamW: parameters, gradients, and the optimizer's state.
The peak is the process's largest resident memory during three steps, less what it had before the model was made. A
process measures one strategy: a second one would reuse memory that the first has freed, and seem to take less.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import trainer
from examples.transformer import SIZES, Transformer
from trainer.models.sharded import is_sharded

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", choices=SIZES, default="10m", help="millions of parameters (default: %(default)s)")
parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="fsdp", help="(default: %(default)s)")


def held(tensors: Iterable[Any]) -> int:
    """Return the bytes that this rank holds of these tensors."""
    return sum(one.to_local().nbytes if is_sharded(one) else one.nbytes for one in tensors)


def resident(kind: str) -> int:
    """Return the process's resident memory in bytes, VmRSS now or VmHWM at most."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measure(strategy: str, size: str) -> None:
    """Take three steps; print on rank 0 what the rank that holds the most holds, in MB."""
    run = trainer.init(strategy)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = resident("VmRSS")
    torch.manual_seed(0)
    model = Transformer(*SIZES[size], length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward, optimizer = run.prepare(model, optimizer)
    for _ in range(3):
        text = torch.randint(256, (2, 64), device=run.device)
        optimizer.zero_grad()
        run.backward(F.cross_entropy(forward(text).flatten(0, 1), text.roll(-1, 1).flatten()))
        optimizer.step()
    parameters = list(model.parameters())
    own = [
        held(parameters),
        held(one.grad for one in parameters if one.grad is not None),
        held(value for one in parameters for value in optimizer.state[one].values()),
    ]
    own += [sum(own), resident("VmHWM") - before]
    cells = [f"{max(column) / 1e6:.1f}" for column in zip(*run.all_gather(own), strict=True)]
    run.print("| strategy | ranks | parameters | gradients | optimizer state | together | peak of the process |")
    run.print(f"| {' | '.join([strategy, str(run.world_size), *cells])} |")
    run.barrier()
    run.close()


if __name__ == "__main__":
    args = parser.parse_args()
    measure(args.strategy, args.size)
