"""Storage: which ranks write a checkpoint, where the newest is, how every host gets it, and the thread that writes.

The first rank of each host writes to its host's disk, unless another host that has the same folder, on a shared file
system, does so already. So the loss of a host loses no checkpoint, whatever the hosts share. Nothing has to be sent
while the training runs, because every rank holds the same weights. And what each host writes is complete, so that
committing needs no agreement between hosts. At start, all ranks agree on the newest, and a rank that has it broadcasts
it to the hosts that do not.

Where ranks hold parts of the weights and share one folder, each of them may write its part.
"""

from __future__ import annotations

import hashlib
import io
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.checkpoint.disk.commit import OthersFailedError, begin, commit, contribute, prune, remove_partial
from trainer.checkpoint.disk.committed import MANIFEST, Committed, Order, find, load, name_of, newest, order_of
from trainer.checkpoint.disk.durable import FileEntry
from trainer.checkpoint.disk.lock import lock_folder
from trainer.checkpoint.disk.state_files import STATE, part_name, read_state
from trainer.checkpoint.run.snapshot import Snapshot
from trainer.cluster.output import print_line
from trainer.errors import ConfigError, DataError, TrainerError, name_rank
from trainer.models.sharded import take_part
from trainer.strategies.base import Strategy
from trainer.untrusted import open_file

_CHUNK_BYTES = 8 << 20


def load_run(path: Path) -> Committed:
    """Load a checkpoint that others may have written; raise `DataError` if it is damaged or lacks a run's facts."""
    checkpoint = load(path)
    match dict(checkpoint.facts):
        case {"written": str(time), "best": None} if time.isprintable():
            return checkpoint
        case {"written": str(time), "best": [int() | float(), str(name)]} if time.isprintable() and order_of(name):
            return checkpoint  # the best is a folder beside this one
    raise DataError(f"checkpoint {path}: {MANIFEST} has no valid written and best among its facts")


def gather_problem(strategy: Strategy, error: TrainerError | None) -> TrainerError | None:
    """Return on every rank what has failed on any of them, or None. Collective.

    Of several errors, this is the lowest rank's: of a user's mistake, or else of a rank that has not just waited for
    another in vain.
    """
    world, rank_of_kind = strategy.world, 1 - isinstance(error, ConfigError) + isinstance(error, OthersFailedError)
    here = (rank_of_kind, name_rank(str(error), world.rank, world.size, world.host)) if error else None
    found = [told for told in strategy.all_gather_object(here) if told]
    kind, text = min(found, key=lambda told: told[0], default=(0, ""))
    return (TrainerError if kind else ConfigError)(text) if found else None


@contextmanager
def together(strategy: Strategy) -> Iterator[None]:
    """Raise an error of this context's on one rank on every rank. Collective."""
    error: TrainerError | None = None
    try:
        yield
    except TrainerError as caught:
        error = caught
    if problem := gather_problem(strategy, error):
        raise problem


class Storage:
    """The checkpoints' folder, and this rank's part in writing there.

    Making it, `find_start` and `copy` are collective; nothing else is.

    Args:
        folder: the same path on every host; made where it is missing.

    Raises:
        TrainerError: it cannot be written on some host, or another job uses it; raised on every rank.
    """

    def __init__(self, folder: Path, strategy: Strategy) -> None:
        self.folder, self._strategy, self._world = folder, strategy, strategy.world
        self._lock: io.FileIO | None = None
        job = strategy.broadcast_object(uuid.uuid4().hex)
        is_first_of_host = self._world.local_rank == 0
        # Rank 0 first, so that it writes wherever the folder is shared with its host.
        for is_asked in (self._world.is_root, is_first_of_host and not self._world.is_root):
            with together(strategy):
                if is_asked:
                    self._lock = lock_folder(folder, job)
        self.is_writer = self._lock is not None
        """Whether this rank writes the copy of its host, or of the hosts that share the folder."""
        if self.is_writer:
            remove_partial(folder)
        self.has_parts = sum(strategy.all_gather_object(self.is_writer)) == 1 < self._world.size and strategy.shards
        """Whether each rank writes its part of sharded tensors; else a file has them whole."""
        self.attempt, self._start = 1, (0, 0, 0)
        """Number of this start of the training; known after `find_start`."""
        self.written: Order = (0, 0, 0)
        """The newest checkpoint that this rank has in the folder, or has written its part of."""
        self.error: TrainerError | None = None
        """Why this rank could not write the last checkpoint."""
        self.seconds: list[float] = []
        """Time of each commit, beside the training."""
        self._snapshot, self._has_begun = Snapshot(keeps_parts=self.has_parts), False
        # One thread for all: a new one for each snapshot would keep the training waiting until it runs. Python waits
        # for it, so that a script that ends lets it finish.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")
        self._writing: Future[None] | None = None

    def find_start(self) -> Committed | None:
        """Return the newest checkpoint that any host has, where this rank can read it, or None.

        A damaged checkpoint is named in a warning, and passed over.

        Raises:
            ConfigError: the newest is of a later format.
            TrainerError: a host cannot keep a copy, or read what it has now. All are raised on every rank.
        """
        here, attempt = None, 0
        with together(self._strategy):
            if self.is_writer:
                attempt = max((order[0] for path in find(self.folder) if (order := order_of(path.name))), default=0)
                here = newest(self.folder, self._warn, load_run)
        found, attempts = zip(*self._strategy.all_gather_object((here, attempt)), strict=True)
        chosen: Committed | None = max(filter(None, found), key=lambda checkpoint: checkpoint.order, default=None)
        self.attempt = max(attempts) + 1
        if chosen is None:
            return None
        self.attempt, self._start, self.written = max(self.attempt, chosen.order[0] + 1), chosen.order, chosen.order
        lacks = self.is_writer and (here is None or here.files != chosen.files)
        if any(self._strategy.all_gather_object(lacks)):
            chunks = self._broadcast(chosen, found.index(chosen))
            with together(self._strategy):
                try:
                    if lacks:
                        self._receive(chosen, chunks, here)
                finally:
                    for _ in chunks:  # each rank takes part in all broadcasts, also a rank that could not write
                        pass
        return replace(chosen, path=self.folder / chosen.name)

    def valid_paths(self) -> list[Path]:
        """Return the checkpoints of this start, and those up to the one that it goes on from, newest first.

        Those between were found to be damaged. Not collective: each rank looks at its host's disk.
        """
        orders = ((order_of(path.name), path) for path in find(self.folder))
        return [path for order, path in orders if order and (order[0] >= self.attempt or order <= self._start)]

    def copy(self, state: Mapping[str, Any], order: Order | None = None) -> None:
        """Copy the state if this rank writes; raises as `Snapshot.copy`.

        Collective where tensors are sharded and ranks do not write their parts: those that write get them whole.

        Args:
            order: of the checkpoint that it is for. Where others write parts of it, they can once this has returned.
        """
        if not (self.is_writer or self.has_parts):
            take_part(state)
            return
        self._snapshot.copy(state)
        self._has_begun = True
        if order and self.is_writer and self.has_parts:
            try:
                begin(self.folder, name_of(*order))
            except TrainerError as error:
                self.error, self._has_begun = error, False

    def commit(self, order: Order, random: list[Any], facts: Mapping[str, Any], keep: int) -> None:
        """Begin to commit what was copied, or to write this rank's part of it; `error` will say if that fails.

        Args:
            random: the random states of all ranks.
            keep: how many of the newest checkpoints stay in the folder, besides the best.
        """
        if self._has_begun:
            self._snapshot.state["random"] = random
            self._writing = self._pool.submit(self._commit, order, facts, keep)

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._writing is not None:
            wait([self._writing])

    def close(self) -> None:
        """Let another job use the folder, once nothing is being written."""
        self._pool.shutdown()
        if self._lock is not None:
            self._lock.close()

    def _commit(self, order: Order, facts: Mapping[str, Any], keep: int) -> None:
        if self.is_writer and self.written == order:
            return  # saved again, because another host could not write it
        started = time.monotonic()
        try:
            self._write(name_of(*order), facts)
            self.written, self.error = order, None
        except TrainerError as error:
            self.error = error
        except Exception as error:  # such as a MemoryError: nobody else would be told of it
            self.error = TrainerError(f"the checkpoint cannot be written: {type(error).__name__}: {error}")
        try:
            if self.error is None and self.is_writer:
                best = [self.folder / facts["best"][1]] if facts["best"] else []
                prune(self.folder, [*self.valid_paths()[:keep], *best])
        except TrainerError as error:  # which takes nothing from the new one
            print_line(f"trainer: WARNING: {error}; the new one is saved", sys.stderr)
        self.seconds.append(time.monotonic() - started)

    def _write(self, name: str, facts: Mapping[str, Any]) -> None:
        part, *others = _parts(self._world.rank, self._world.size) if self.has_parts else [""]
        files = {part: partial(torch.save, self._snapshot.parts)} if part else {}
        if not self.is_writer:
            contribute(self.folder, name, part, files[part])
            return
        files[STATE] = partial(torch.save, self._snapshot.state)
        # A checkpoint that cannot be loaded is found at the first one.
        check = None if self.seconds else partial(read_state, is_mapped=True)
        commit(self.folder, name, files, facts, check, others=others)

    def _broadcast(self, chosen: Committed, owner: int) -> Iterator[bytes]:
        """Yield each file of rank `owner`'s checkpoint in chunks, and an empty chunk at its end."""
        for name in chosen.files:
            chunk, sent = b"-", _read(chosen.path / name) if self._world.rank == owner else None
            while chunk:
                chunk, problem = self._strategy.broadcast_object(next(sent) if sent else None, root=owner)
                if problem:
                    raise TrainerError(problem)
                yield chunk

    def _receive(self, chosen: Committed, chunks: Iterator[bytes], here: Committed | None) -> None:
        """Commit what is broadcast."""
        if here is not None and here.order == chosen.order:
            # A host that was cut off has trained these updates too, and not with the same samples on each rank.
            prune(self.folder, [path for path in find(self.folder) if path != here.path])
        files = {name: partial(_write, chunks, entry) for name, entry in chosen.files.items()}
        commit(self.folder, chosen.name, files, chosen.facts)

    def _warn(self, problem: str) -> None:
        print_line(f"trainer: WARNING: on host {self._world.host}: {problem}", sys.stderr)


def _parts(rank: int, size: int) -> list[str]:
    """Return the name of a rank's file, and then those of the others."""
    return [part_name(rank), *(part_name(other) for other in range(size) if other != rank)]


def _read(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yield a file's chunks; at last an empty one, with the reason if the file cannot be read."""
    problem = ""
    try:
        with open_file(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk, ""
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
    yield b"", problem


def _write(chunks: Iterator[bytes], entry: FileEntry, file: BinaryIO) -> None:
    digest = hashlib.sha256()
    for chunk in iter(lambda: next(chunks), b""):
        file.write(chunk)
        digest.update(chunk)
    if digest.hexdigest() != entry.sha256:
        raise DataError("a checkpoint did not arrive as it was sent")
