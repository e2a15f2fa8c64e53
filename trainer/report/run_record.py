"""The run's record: what `Trainer` writes into the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.report.callback import Callback, EpochRecord, FitContext, UpdateRecord
from trainer.report.run_folder import RunFolder, describe_optimizer, describe_run, open_on_root


class RunRecord(Callback):
    """Write one folder per run, on rank 0 only:

    * `settings.json`: the configuration, the world, what was tuned, versions and the command line;
    * `steps.jsonl`: the loss and the learning rate, a line every `log_every_updates` updates;
    * `epochs.jsonl`: one line of JSON per epoch, written when the epoch ends;
    * `summary.json`: written last; a run that has none did not finish;
    * `starts.jsonl`: where it went on from a checkpoint, a line of settings for each further start.

    TensorBoard's curves go over the updates, also those that have a point per epoch.

    Args:
        output: the folder, which must not hold a run yet; "auto" makes `runs/<script>-<date>-<time>`.
        tensorboard: also write TensorBoard events there.
    """

    def __init__(self, output: str | Path, *, tensorboard: bool = False) -> None:
        self._output = output
        self.folder = Path(output)
        """Folder of the record; with "auto" it is known once a fit has started."""
        self._tensorboard = tensorboard
        self._files: RunFolder | None = None
        self._earlier: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._earlier = state

    def on_fit_start(self, context: FitContext) -> None:
        """Create the folder and settings.json.

        Raises:
            TrainerError: rank 0 cannot write; raised on every rank.
        """
        self.folder, self._files = open_on_root(context.world, context.broadcast_object, lambda: self._make(context))

    def _make(self, context: FitContext) -> RunFolder:
        where: str | Path = self._output
        # That of the run's earlier part, unless it was left on another host or another one is asked for.
        if self._earlier is not None and where == "auto" and Path(self._earlier["folder"], "settings.json").exists():
            where = self._earlier["folder"]
        settings = _settings(context)
        files = RunFolder(where, settings, tensorboard=self._tensorboard, goes_on=bool(context.checkpoints))
        files.keep_lines("steps.jsonl", lambda line: line["step"] <= context.updates_before)
        files.keep_lines("epochs.jsonl", lambda line: line["epoch"] <= context.epochs_before)
        return files

    def on_update(self, context: FitContext, record: UpdateRecord) -> None:
        if self._files is not None:
            values = {"loss": record.loss, "lr": record.learning_rate}
            self._files.append_step(record.update, {"epoch": record.epoch, "samples": record.samples, **values})
            self._files.plot(record.update, {"train/loss": record.loss, "lr": record.learning_rate})

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        if self._files is None:
            return
        self._files.append("epochs.jsonl", {**asdict(record), "samples_per_s": record.samples_per_s})
        values = {
            "train/loss_epoch": record.train_loss,
            "train/samples_per_s": record.samples_per_s,
            "epoch": record.epoch,
        }
        if not context.config.log_every_updates:
            values["lr"] = record.learning_rate
        metrics = record.validation.metrics if record.validation else {}
        self._files.plot(record.updates, values | {f"validation/{name}": value for name, value in metrics.items()})
        self._files.flush()

    def on_fit_end(self, context: FitContext, records: list[EpochRecord]) -> None:
        if self._files is None:
            return
        last = records[-1]
        self._files.write(
            "summary.json",
            {
                "epochs": len(records),
                "seconds": self._files.seconds(),
                "train_loss": last.train_loss,
                "validation": asdict(last.validation) if last.validation else None,
                "samples_per_s": [record.samples_per_s for record in records],
            },
        )
        self._files.close()


def _settings(context: FitContext) -> dict[str, Any]:
    return {
        "epochs": context.epochs,
        "config": context.config.as_dict(),
        "learning_rate": context.learning_rate,
        "strategy": context.strategy_name,
        "description": context.description,
        "tuning": dict(context.tuning),
        "checkpoints": context.checkpoints,
        "optimizer": describe_optimizer(context.optimizer),
        **describe_run(context.world),
    }
