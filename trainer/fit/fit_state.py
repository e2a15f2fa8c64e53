"""How far a fit has come: what a checkpoint keeps of `Trainer`'s loop, beside what it keeps of every run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.loop.metrics import Sums
from trainer.report.callback import Callback, EpochRecord, Evaluation
from trainer.strategies.base import Strategy


class FitState:
    """Updates, epochs and the running sums of one fit, and the callbacks' own states.

    Args:
        callbacks: their states are kept by class, and by place among those of a class.
    """

    def __init__(self, strategy: Strategy, callbacks: Sequence[Callback]) -> None:
        self.updates = 0
        """Updates since the fit began."""
        self.records: list[EpochRecord] = []
        """Of the epochs that have ended."""
        self.learning_rate = 0.0
        """Of the last update, first parameter group."""
        self._strategy = strategy
        kinds = [type(one).__name__ for one in callbacks]
        self._callbacks = {
            f"{kind}.{kinds[:number].count(kind)}": one
            for number, (kind, one) in enumerate(zip(kinds, callbacks, strict=True))
        }
        self.begin_epoch()

    def begin_epoch(self, *, is_resumed: bool = False) -> None:
        """Begin the sums anew, or go on with those of an epoch that was interrupted."""
        if not is_resumed:
            self.sums, self._seconds = Sums(("loss",), self._strategy.world.device), 0.0
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the seconds of training in this epoch, those before an interruption included."""
        return self._seconds + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the sums of all ranks. Collective."""
        means, samples = self.sums.mean(self._strategy.all_reduce)
        return {
            "updates": self.updates,
            "records": [asdict(record) for record in self.records],
            "loss": means["loss"],
            "samples": samples,
            "seconds": self.seconds,
            "learning_rate": self.learning_rate,
            "callbacks": {name: dict(one.state_dict()) for name, one in self._callbacks.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state. Rank 0 takes the sums of all ranks, which may have been another number of them."""
        self.updates, self.learning_rate = state["updates"], state.get("learning_rate", 0.0)
        self.records = [_record(one) for one in state["records"]]
        self.begin_epoch()
        self._seconds = state["seconds"]
        if self._strategy.world.is_root:
            self.sums.add((state["loss"] * state["samples"],), state["samples"])
        for name, one in self._callbacks.items():
            if name in state["callbacks"]:
                one.load_state_dict(state["callbacks"][name])


def _record(values: Mapping[str, Any]) -> EpochRecord:
    validation = Evaluation(**values["validation"]) if values["validation"] else None
    return EpochRecord(**{**values, "validation": validation})
