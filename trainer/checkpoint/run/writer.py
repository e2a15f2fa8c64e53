"""Writer: writes snapshots in a thread beside the training, one at a time."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.disk.commit import TIMEOUT_S, begin, commit, contribute, find, name_of, prune
from trainer.checkpoint.disk.manifest import Order
from trainer.checkpoint.disk.state_files import STATE, read_state
from trainer.errors import TrainerError


class Writer:
    """Commits snapshots into a folder, and removes those that are not to be kept.

    Args:
        keep: the newest so many are kept.
        damaged: were passed over at the start, and are not among those.
        kept: are never removed.
        others: files of each checkpoint that other ranks write.
    """

    def __init__(
        self, folder: Path, keep: int, damaged: Collection[Path], kept: Collection[Path], others: Collection[str] = ()
    ) -> None:
        self._folder, self._keep, self._damaged, self._kept = folder, keep, frozenset(damaged), kept
        self._others = others
        # One thread for all: a new one for each snapshot would keep the training waiting until it runs. Python waits
        # for it, so that a script that ends lets it finish.
        self._pool = _make_pool()
        self._writing: Future[None] | None = None
        self._has_checked = False
        self.written: Order | None = None
        """The newest that this rank has committed, or written its part of."""
        self.error: TrainerError | None = None
        """Why the last one was not committed."""
        self.seconds: list[float] = []
        """Time of each commit, beside the training."""

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def begin(self, order: Order) -> bool:
        """Make room for other ranks' files, before they and this rank `start`; return whether that went well."""
        if not self._others or self.written == order:
            return True
        try:
            begin(self._folder, name_of(*order))
        except TrainerError as error:
            self.error = error
            return False
        return True

    def start(self, order: Order, files: Mapping[str, Any], facts: Mapping[str, Any], best: str | None) -> None:
        """Commit a snapshot in a thread; the caller must not change it before `wait` has returned.

        Args:
            files: what is written to each file, in PyTorch's own format. Without `STATE`, another rank commits it.
            facts: put into the manifest.
            best: the name of one to keep as well.
        """
        self.wait()
        self._writing = self._pool.submit(self.commit, order, files, facts, best)

    def wait(self) -> None:
        """Return when nothing is being written."""
        writing = self._writing  # a signal's thread waits for it as well
        if writing is not None:
            wait([writing])

    def close(self) -> None:
        """End the thread, once nothing is being written; `start` makes another one."""
        self._pool.shutdown()
        self._pool = _make_pool()

    def commit(
        self, order: Order, files: Mapping[str, Any], facts: Mapping[str, Any], best: str | None, alone_s: float = 0.0
    ) -> None:
        """Commit a snapshot now; `error` says whether it was.

        Args:
            alone_s: seconds to wait for other ranks' files, where these ranks have not agreed to save.
        """
        if self.written == order:
            return  # saved again, because another host could not write it
        started = time.monotonic()
        try:
            self._write(name_of(*order), files, facts, alone_s)
            self.written, self.error = order, None
            if STATE in files:
                self._prune(best)
        except TrainerError as error:
            self.error = error
        except Exception as error:  # such as a MemoryError: nobody else would be told of it
            self.error = TrainerError(f"the checkpoint cannot be written: {type(error).__name__}: {error}")
        self.seconds.append(time.monotonic() - started)

    def _write(self, name: str, files: Mapping[str, Any], facts: Mapping[str, Any], alone_s: float) -> None:
        writes = {file: partial(torch.save, content) for file, content in files.items()}
        if STATE not in files:
            for file, write in writes.items():
                contribute(self._folder, name, file, write, begins_within_s=alone_s)
            return
        commit(
            self._folder,
            name,
            writes,
            facts,
            # A checkpoint that cannot be loaded is found at the first one.
            check=None if self._has_checked else _load_as_data,
            is_begun=bool(self._others) and not alone_s,
            others=self._others,
            timeout_s=alone_s or TIMEOUT_S,
        )
        self._has_checked = True

    def _prune(self, best: str | None) -> None:
        valid = [path for path in find(self._folder) if path not in self._damaged]
        prune(self._folder, [*valid[: self._keep], *self._kept, *([self._folder / best] if best else [])])


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")


def _load_as_data(folder: Path) -> None:
    try:
        read_state(folder, is_mapped=True)
    except Exception as error:
        raise TrainerError(f"the checkpoint cannot be loaded as data ({error})") from None


def missing_bytes(folder: Path, needed: int) -> int:
    """Return how many bytes the disk lacks for `needed` more; 0 where it has them."""
    return max(0, needed - shutil.disk_usage(folder).free)
