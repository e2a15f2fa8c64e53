"""Writer: writes snapshots in a thread beside the training, one at a time."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.commit import Committed, commit, find, name_of, prune
from trainer.checkpoint.manifest import Order
from trainer.errors import TrainerError

STATE = "state.pt"


class Writer:
    """Commits snapshots into a folder, and removes those that are not to be kept.

    Args:
        keep: the newest so many are kept.
        damaged: were passed over at the start, and are not among those.
        kept: are never removed.
    """

    def __init__(self, folder: Path, keep: int, damaged: Collection[Path], kept: Collection[Path]) -> None:
        self._folder, self._keep, self._damaged, self._kept = folder, keep, frozenset(damaged), kept
        # One thread for all: a new one for each snapshot would keep the training waiting until it runs. Python waits
        # for it, so that a script that ends lets it finish.
        self._pool = _make_pool()
        self._writing: Future[None] | None = None
        self._has_checked = False
        self.committed: Committed | None = None
        """The newest that this job has committed."""
        self.error: TrainerError | None = None
        """Why the last one was not committed."""
        self.seconds: list[float] = []
        """Time of each commit, beside the training."""

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def start(self, order: Order, state: Mapping[str, Any], facts: Mapping[str, Any], best: str | None) -> None:
        """Commit a snapshot in a thread; the caller must not change it before `wait` has returned.

        Args:
            state: written to `STATE`, in PyTorch's own format.
            facts: put into the manifest.
            best: the name of one to keep as well.
        """
        self.wait()
        self._writing = self._pool.submit(self.commit, order, state, facts, best)

    def wait(self) -> None:
        """Return when nothing is being written."""
        writing = self._writing  # a signal's thread waits for it as well
        if writing is not None:
            wait([writing])

    def close(self) -> None:
        """End the thread, once nothing is being written; `start` makes another one."""
        self._pool.shutdown()
        self._pool = _make_pool()

    def commit(self, order: Order, state: Mapping[str, Any], facts: Mapping[str, Any], best: str | None) -> None:
        """Commit a snapshot now; `error` says whether it was."""
        if self.committed is not None and self.committed.order == order:
            return  # saved again, because another host could not write it
        started = time.monotonic()
        # A checkpoint that cannot be loaded is found at the first one.
        check = None if self._has_checked else _load_as_data
        try:
            self.committed = commit(
                self._folder, name_of(*order), {STATE: lambda stream: torch.save(state, stream)}, facts, check
            )
            self._has_checked, self.error = True, None
            self._prune(best)
        except TrainerError as error:
            self.error = error
        except Exception as error:  # such as a MemoryError: nobody else would be told of it
            self.error = TrainerError(f"the checkpoint cannot be written: {type(error).__name__}: {error}")
        self.seconds.append(time.monotonic() - started)

    def _prune(self, best: str | None) -> None:
        valid = [path for path in find(self._folder) if path not in self._damaged]
        prune(self._folder, [*valid[: self._keep], *self._kept, *([self._folder / best] if best else [])])


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")


def _load_as_data(folder: Path) -> None:
    try:
        torch.load(folder / STATE, weights_only=True, mmap=True)
    except Exception as error:
        raise TrainerError(f"the checkpoint cannot be loaded as data ({error})") from None


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, on the CPU."""
    state: dict[str, Any] = torch.load(path / STATE, weights_only=True, map_location="cpu")
    return state


def missing_bytes(folder: Path, needed: int) -> int:
    """Return how many bytes the disk lacks for `needed` more; 0 where it has them."""
    return max(0, needed - shutil.disk_usage(folder).free)
