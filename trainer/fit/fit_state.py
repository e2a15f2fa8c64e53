"""The state of `Trainer`'s loop, which a checkpoint keeps beside the state of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from trainer.report.callback import Callback, EpochRecord, Evaluation
from trainer.strategies.base import Strategy


class FitState:
    """Updates, epochs and the running loss of a fit, and the callbacks' states.

    The loss is summed up on the device, in float64, so that no batch waits for the device.

    Args:
        callbacks: their states are kept by class name, and by number among the callbacks of a class.
    """

    def __init__(self, strategy: Strategy, callbacks: Sequence[Callback]) -> None:
        self.updates = 0
        """Updates since the fit began."""
        self.records: list[EpochRecord] = []
        """The records of the epochs that have ended."""
        self.learning_rate = 0.0
        """The learning rate of the last update, in the first parameter group."""
        self._strategy = strategy
        kinds = [type(callback).__name__ for callback in callbacks]
        self._callbacks = {
            f"{kind}.{kinds[:number].count(kind)}": callback
            for number, (kind, callback) in enumerate(zip(kinds, callbacks, strict=True))
        }
        self.begin_epoch()

    def begin_epoch(self, *, is_resumed: bool = False) -> None:
        """Start the epoch's sums at zero, or go on with those of an epoch that was interrupted."""
        if not is_resumed:
            self._loss = torch.zeros((), dtype=torch.float64, device=self._strategy.world.device)
            self._samples, self._seconds, self._last = 0, 0.0, (0.0, 0)
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of training in this epoch, including those before an interruption."""
        return self._seconds + time.perf_counter() - self._started

    def add(self, loss: Tensor, samples: int) -> None:
        """Add the mean loss of a batch of this rank."""
        self._loss.add_(loss.detach(), alpha=samples)
        self._samples += samples

    def local_loss(self) -> float:
        """Return the mean loss over this rank's samples of this epoch; 0.0 without any. Waits for the device."""
        return float(self._loss) / max(self._samples, 1)

    def local_loss_since_last(self) -> float:
        """Return the mean loss over this rank's samples since the last call. Waits for the device."""
        loss, samples = self._last
        self._last = (float(self._loss), self._samples)
        return (self._last[0] - loss) / max(self._samples - samples, 1)

    def mean_loss(self) -> tuple[float, int]:
        """Return the mean loss over all ranks' samples of this epoch, and how many these are. Collective."""
        samples = torch.tensor(float(self._samples), dtype=torch.float64, device=self._loss.device)
        total, count = self._strategy.all_reduce(torch.stack([self._loss, samples])).tolist()
        return total / max(count, 1), round(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the sums of all ranks. Collective."""
        loss, samples = self.mean_loss()
        return {
            "updates": self.updates,
            "records": [asdict(record) for record in self.records],
            "loss": loss,
            "samples": samples,
            "seconds": self.seconds,
            "learning_rate": self.learning_rate,
            "callbacks": {name: dict(callback.state_dict()) for name, callback in self._callbacks.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state. Rank 0 takes the sums of all ranks of the earlier run, however many they were."""
        self.updates, self.learning_rate = state["updates"], state.get("learning_rate", 0.0)
        self.records = [_record(values) for values in state["records"]]
        self.begin_epoch()
        self._seconds = state["seconds"]
        if self._strategy.world.is_root:
            self._loss += state["loss"] * state["samples"]
            self._samples = state["samples"]
        for name, callback in self._callbacks.items():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])


def _record(values: Mapping[str, Any]) -> EpochRecord:
    validation = Evaluation(**values["validation"]) if values["validation"] else None
    return EpochRecord(**{**values, "validation": validation})
