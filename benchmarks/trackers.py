"""Measures what each tracker of docs/trackers.md costs per step, in microseconds.

    python scripts/install/peers.py
    python benchmarks/trackers.py

The functions and the callback are those of the page. `Trainer.fit` trains a network so small that a step is mostly
overhead, at the default `log_every_updates`, in blocks that take turns: the tracker gets the values of every other
block. Its cost is the difference of two neighbouring blocks, per step, threads and processes of the tracker included;
the median over many pairs is robust against other load on the machine. What is done once, at the start and at the end
of a run, does not count.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import trainer
from benchmarks.launching import PEERS, ROOT, run

_BATCH_SIZE = 10
_WARM_UP_PAIRS = 3
_LIMIT_US = 50


def of_page() -> tuple[dict[str, str], str]:
    """Return the function `track` of every tracker, by its heading, and the class `Tracked`, as the page has them."""
    page = (ROOT / "docs/trackers.md").read_text()
    sections = [section.partition("\n") for section in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]]
    blocks = {name: text.partition("```python\n")[2].partition("```")[0] for name, _, text in sections}
    script = blocks["With Trainer"]
    (definition,) = [node for node in ast.parse(script).body if isinstance(node, ast.ClassDef)]
    functions = {name: text for name, text in blocks.items() if "def track(" in text}
    return functions, f"import trainer\n{ast.unparse(definition)}"


class EveryOther(trainer.Callback):
    """Pass the updates of one fit after another to a callback, or keep them from it."""

    def __init__(self, callback: trainer.Callback) -> None:
        self._callback, self._updates, self.is_on = callback, 0, True

    def on_fit_start(self, context: trainer.FitContext) -> None:
        if not self._updates:
            self._callback.on_fit_start(context)

    def on_update(self, context: trainer.FitContext, record: trainer.UpdateRecord) -> None:
        self._updates += context.config.log_every_updates
        if self.is_on:
            self._callback.on_update(context, dataclasses.replace(record, update=self._updates))


def differences_us(tracker: str, pairs: int, steps: int) -> Iterator[float]:
    """Yield what a step with the tracker took longer than one without, pair by pair."""
    functions, definition = of_page()
    names: dict[str, Any] = {}
    exec(f"{functions[tracker]}\n{definition}", names)  # noqa: S102 (the page's code)
    switch = EveryOther(names["Tracked"]())
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    fitting = trainer.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        F.cross_entropy,
        config=trainer.TrainerConfig(batch_size=_BATCH_SIZE, scale_lr=False, device="cpu"),
        callbacks=[switch],
        output=None,
        progress=False,
    )
    data = trainer.InMemory(torch.randn(steps * _BATCH_SIZE, 4), torch.randint(2, (steps * _BATCH_SIZE,)))
    for pair in range(-_WARM_UP_PAIRS, pairs):
        seconds = {}
        for switch.is_on in (True, False) if pair % 2 else (False, True):
            seconds[switch.is_on] = fitting.fit(data, epochs=1)[0].seconds
        if pair >= 0:
            yield (seconds[True] - seconds[False]) / steps * 1e6


def measure(tracker: str, pairs: int, steps: int) -> list[float]:
    """Return the quartiles of the differences, measured in a process of its own, in µs."""
    script = [str(PEERS / "bin/python"), "-m", "benchmarks.trackers", tracker, str(pairs), str(steps)]
    finished = run(script, timeout_s=600, threads=1)
    if finished.problem is not None:
        raise RuntimeError(f"{tracker}: {finished.problem}\n{finished.stderr}")
    quartiles: list[float] = json.loads(finished.stdout.splitlines()[-1])
    return quartiles


def main() -> int:
    if len(sys.argv) == 4:  # the process that measures a tracker
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # what the trackers write
            os.environ["TRACKIO_DIR"] = folder
            found = list(differences_us(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
            print("", json.dumps(statistics.quantiles(found, n=4, method="inclusive")), sep="\n", flush=True)
        return 0
    is_slow = False
    print("| tracker | µs per step, median | quartiles |\n|---|---|---|")
    for tracker in of_page()[0]:
        low, median, high = measure(tracker, pairs=100, steps=500)
        print(f"| {tracker} | {median:.1f} | {low:.1f} to {high:.1f} |", flush=True)
        is_slow |= median > _LIMIT_US
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
