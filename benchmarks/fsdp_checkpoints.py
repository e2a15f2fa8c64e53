"""What a checkpoint of a sharded training costs: one file that a rank gathers, or a part from each rank.

torchrun --nproc-per-node 4 benchmarks/fsdp_checkpoints.py runs/fsdp --size 100m --files auto
torchrun --nproc-per-node 4 benchmarks/fsdp_checkpoints.py runs/fsdp --size 100m --files auto --resume

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
from trainer.config import CHECKPOINT_FILES
from trainer.watch.failure import report_failures

LENGTH = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path, help="where the checkpoints are written")
parser.add_argument("--size", choices=SIZES, default="10m", help="millions of parameters (default: %(default)s)")
parser.add_argument("--files", choices=CHECKPOINT_FILES, default="auto", help="(default: %(default)s)")
parser.add_argument("--resume", action="store_true", help="go on from what the same command without it has written")


class Rank:
    """One rank's training, and its memory from now on."""

    def __init__(self, size: str, updates: int) -> None:
        self.run = trainer.init("fsdp")
        torch.manual_seed(0)
        self.model = Transformer(*SIZES[size], length=LENGTH)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.forward, self.optimizer = self.run.prepare(self.model, optimizer)
        text = torch.randint(256, (updates * self.run.world_size, LENGTH))
        self.loader = self.run.loader(trainer.InMemory(text, text.roll(-1, 1)), batch_size=1)
        self.begin()

    def begin(self) -> None:
        """Count time and memory from here."""
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
        self._before, self._started = resident("VmRSS"), time.monotonic()

    def taken(self) -> list[float]:
        """Return the memory in MB and the seconds since `begin`."""
        return [(resident("VmHWM") - self._before) / 1e6, time.monotonic() - self._started]

    def update(self) -> None:
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            self.run.backward(F.cross_entropy(self.forward(inputs).flatten(0, 1), targets.flatten()))
            self.optimizer.step()

    def show(self, names: str, first: str, own: list[float]) -> None:
        largest = (max(column) for column in zip(*self.run.all_gather(own), strict=True))
        cells = " | ".join(f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in largest)
        self.run.print(f"| files | ranks | {names} |\n| {first} | {self.run.world_size} | {cells} |")


def measure_saves(folder: Path, size: str, files: str) -> None:
    rank = Rank(size, updates=1)
    rank.update()  # what the first step allocates is no checkpoint's
    checkpoints = rank.run.checkpoints(folder, every_epochs=1, keep=1, resume="none", files=files)
    rank.begin()
    for _ in rank.run.epochs(6):
        rank.update()
    checkpoints.close()
    memory, _ = rank.taken()
    on_disk = sum(file.stat().st_size for file in folder.glob("attempt-*/*")) / 1e6
    commits = checkpoints.writes_s[1:] or [0.0]
    times = [1000 * statistics.median(checkpoints.stalls_s[1:]), statistics.median(commits)]
    rank.show("MB on disk | MB more memory | ms of stall | s to commit", files, [on_disk, memory, *times])
    rank.run.close()


def measure_resume(folder: Path, size: str, files: str) -> None:
    rank = Rank(size, updates=1)
    rank.begin()
    rank.run.checkpoints(folder, files=files).close()
    rank.show("MB more memory | s to load", files, rank.taken())
    rank.run.close()


if __name__ == "__main__":
    report_failures()
    args = parser.parse_args()
    (measure_resume if args.resume else measure_saves)(args.folder, args.size, args.files)
