"""The lineage of a training: which updates the final weights come from, by what the ranks have logged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.disk.committed import order_of


@dataclass(frozen=True)
class Start:
    """One start of the training, as its ranks have logged it."""

    attempt: int
    resumed: str | None
    """The checkpoint from which it went on."""
    time: float
    """When it began to train, by the monotonic clock."""
    updates: dict[int, list[dict[str, Any]]]
    """By number, what each rank that has taken it has logged."""

    @property
    def first_update_s(self) -> float | None:
        """When its first update was taken."""
        return min((line["time"] for lines in self.updates.values() for line in lines), default=None)


def read(folder: Path) -> list[Start]:
    """Return the starts in their order. A start that has not come to its checkpoints has logged nothing."""
    jobs: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if lines := [json.loads(line) for line in path.read_text().splitlines()]:
            jobs.setdefault(path.name.rpartition("-")[0], []).append(lines)
    starts = []
    for ranks in jobs.values():
        heads = [lines[0] for lines in ranks]
        updates: dict[int, list[dict[str, Any]]] = {}
        for line in (line for lines in ranks for line in lines[1:]):
            updates.setdefault(line["update"], []).append(line)
        begun = min(head["time"] for head in heads)
        if len({(head["attempt"], head["resumed"]) for head in heads}) > 1:
            raise ValueError(f"ranks of one start went on from different checkpoints: {heads}")
        starts.append(Start(heads[0]["attempt"], heads[0]["resumed"], begun, updates))
    return sorted(starts, key=lambda start: start.time)


def problems(starts: Sequence[Start], epochs: int, samples: int, updates: int) -> list[str]:
    """Return what is wrong with the lineage of the last start: each epoch has to have each sample once."""
    lineage: list[dict[str, Any]] = []
    for start, first, last in _chain(starts, updates):
        for number in range(first, last + 1):
            if number not in start.updates:
                return [f"update {number} of attempt {start.attempt} was saved, and no rank has logged it"]
            lineage += start.updates[number]
    wrong = []
    for epoch in range(epochs):
        taken = Counter(sample for line in lineage if line["epoch"] == epoch for sample in line["samples"])
        missing = sorted(set(range(samples)) - taken.keys())
        twice = sorted(sample for sample, times in taken.items() if times > 1)
        if missing or twice:
            wrong.append(f"epoch {epoch}: samples {missing} were never trained, {twice} more than once")
    return wrong


def _chain(starts: Sequence[Start], last: int) -> list[tuple[Start, int, int]]:
    """Return the starts that the end goes back to, each with its first and last update that counts."""
    chain: list[tuple[Start, int, int]] = []
    earlier = list(starts)
    while earlier:
        start = earlier.pop()
        order = order_of(start.resumed) if start.resumed else None
        attempt, saved = (order[0], order[2]) if order else (0, 0)
        chain.append((start, saved + 1, last))
        last = saved
        # Of starts with the same number, all but the last have committed nothing.
        while earlier and earlier[-1].attempt != attempt:
            earlier.pop()
    return chain
