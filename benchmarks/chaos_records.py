"""What chaos_job.py has written down: whether each sample was in each epoch once, and when it was trained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from benchmarks.chaos_job import record_type


@dataclass(frozen=True)
class Start:
    """A start of the job that has trained."""

    job: str
    ranks: int
    records: tuple[numpy.ndarray[Any, Any], ...]
    """Of each rank, in their order. Of a rank that was killed, the last one may be missing."""

    @property
    def times(self) -> numpy.ndarray[Any, Any]:
        """When rank 0's updates began, in seconds since 1970."""
        times: numpy.ndarray[Any, Any] = self.records[0]["time"]
        return times


@dataclass(frozen=True)
class Result:
    """What rank 0 has written at the end."""

    lineage: tuple[tuple[str, int], ...]
    """The starts that have led to it, and the number of updates at which each began."""
    accuracy: float
    """On the test set, in percent."""
    epochs: int
    samples: int
    updates_per_epoch: int


def read_result(folder: Path) -> Result:
    """Return the result of the job."""
    found = json.loads((folder / "result.json").read_text())
    return Result(**{**found, "lineage": tuple((str(job), int(first)) for job, first in found["lineage"])})


def read_starts(folder: Path) -> list[Start]:
    """Return the starts in the order in which they began to train."""
    files: dict[str, dict[int, Path]] = defaultdict(dict)
    sizes: dict[str, tuple[int, int]] = {}
    for path in folder.glob("*-*-*-*"):
        job, rank, ranks, batch = path.name.split("-")
        files[job][int(rank)], sizes[job] = path, (int(ranks), int(batch))
    starts = [
        Start(job, ranks, tuple(_read(files[job].get(rank), batch) for rank in range(ranks)))
        for job, (ranks, batch) in sizes.items()
    ]
    return sorted((start for start in starts if len(start.times)), key=lambda start: float(start.times[0]))


def _read(path: Path | None, batch: int) -> numpy.ndarray[Any, Any]:
    kind = record_type(batch)
    data = path.read_bytes() if path else b""
    return numpy.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], kind)


def problems_of(result: Result, starts: Sequence[Start]) -> list[str]:
    """Return in which epochs the updates that led to the result do not hold each sample exactly once."""
    by_job = {start.job: start for start in starts}
    ends = [*(first for _, first in result.lineage[1:]), result.epochs * result.updates_per_epoch]
    samples: dict[int, list[numpy.ndarray[Any, Any]]] = defaultdict(list)
    for (job, first), last in zip(result.lineage, ends, strict=True):
        for records in by_job[job].records if job in by_job else ():
            for record in records[(records["update"] > first) & (records["update"] <= last)]:
                samples[(int(record["update"]) - 1) // result.updates_per_epoch].append(record["samples"])
    problems = []
    for epoch in range(result.epochs):
        taken = numpy.concatenate([numpy.empty(0, int), *samples[epoch]])
        counts = numpy.bincount(taken[taken >= 0], minlength=result.samples)
        if not (counts == 1).all():
            missing, twice = int((counts == 0).sum()), int((counts > 1).sum())
            problems.append(
                f"epoch {epoch + 1}: {missing:,} samples are missing, {twice:,} were trained more than once"
            )
    return problems
