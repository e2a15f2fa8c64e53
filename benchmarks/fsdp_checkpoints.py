"""What a checkpoint of a sharded training costs, of which each rank writes its part.

torchrun --nproc-per-node 4 benchmarks/fsdp_checkpoints.py runs/fsdp --size 100m
torchrun --nproc-per-node 4 benchmarks/fsdp_checkpoints.py runs/fsdp --size 100m --resume

The first command trains six updates and saves after each; the second goes on from there. Memory is the process's
largest resident memory from before the first save, or while the checkpoint is loaded, less what it had before. Times
are medians of the saves after the first, which allocates the memory. Each figure is of the rank that has the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import trainer
from benchmarks.fsdp_memory import resident
from examples.transformer import SIZES, Transformer

LENGTH = 64


def mark() -> tuple[float, float]:
    """Count the largest resident memory from now on; return the memory and the time of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS"), time.monotonic()


def main() -> None:
    trainer.report_failures()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoints are written")
    parser.add_argument("--size", choices=SIZES, default="10m", help="millions of parameters (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from what the command without it has written")
    args = parser.parse_args()
    run = trainer.init("fsdp")
    torch.manual_seed(0)
    model = Transformer(*SIZES[args.size], length=LENGTH)
    forward, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    text = torch.randint(256, (run.world_size, LENGTH))
    loader = run.loader(trainer.InMemory(text, text.roll(-1, 1)), batch_size=1)

    def update() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten()))
            optimizer.step()

    if not args.resume:
        update()  # what the first step allocates is no checkpoint's
    before, started = mark()
    checkpoints = run.checkpoints(args.folder, every_epochs=1, keep=1)
    if args.resume:
        names, times = "s to load", [time.monotonic() - started]
    else:
        before, _ = mark()
        for _ in run.epochs(6):
            update()
        checkpoints.close()
        commits = checkpoints.writes_s[1:] or [0.0]
        names = "ms of stall | s to commit"
        times = [1000 * statistics.median(checkpoints.stalls_s[1:]), statistics.median(commits)]
    own = [(resident("VmHWM") - before) / 1e6, *times]
    largest = (max(column) for column in zip(*run.all_gather(own), strict=True))
    cells = " | ".join(f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in largest)
    run.print(f"| ranks | MB more memory | {names} |\n| {run.world_size} | {cells} |")
    run.close()


if __name__ == "__main__":
    main()
