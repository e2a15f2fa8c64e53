"""Storage: which ranks write a checkpoint, where the newest one is, and how every host gets it.

The first rank of each host writes to its host's disk, unless another host that has the same folder, on a shared file
system, does so already. So the loss of a host loses no checkpoint, whatever the hosts share. Nothing has to be sent
while the training runs, because every rank holds the same weights. And what each host writes is complete, so that
committing needs no agreement between hosts. At start, all ranks agree on the newest, and one that has it broadcasts it
to the hosts that do not.

Where ranks hold parts of the weights and share one folder, each of them may write its part.
"""

from __future__ import annotations

import hashlib
import io
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from trainer.checkpoint.disk.commit import commit, prune, remove_partial
from trainer.checkpoint.disk.committed import MANIFEST, Committed, find, load, newest, order_of
from trainer.checkpoint.disk.durable import FileEntry
from trainer.checkpoint.disk.lock import lock_folder
from trainer.checkpoint.disk.state_files import part_name
from trainer.cluster.output import print_line
from trainer.errors import ConfigError, DataError, TrainerError, name_rank
from trainer.strategies.base import Strategy
from trainer.untrusted import open_file

_CHUNK_BYTES = 8 << 20


def load_run(path: Path) -> Committed:
    """Load a checkpoint that others may have written; raise `DataError` if it is damaged or lacks a run's facts."""
    checkpoint = load(path)
    match dict(checkpoint.facts):
        case {"resume": str(), "complete": bool(), "written": str(time), "best": best} if time.isprintable():
            match best:
                case None | [int() | float(), str()] if best is None or order_of(best[1]):  # a folder beside this one
                    return checkpoint
    raise DataError(f"checkpoint {path}: {MANIFEST} has no valid resume, complete, written and best among its facts")


class Storage:
    """The checkpoints' folder, as the ranks of this job see it. Its methods are collective, except `close`.

    Args:
        folder: the same path on every host; made where it is missing.
        files: one of `trainer.config.CHECKPOINT_FILES`.

    Raises:
        TrainerError: it cannot be written on some host, or another job uses it; raised on every rank.
    """

    def __init__(self, folder: Path, strategy: Strategy, files: str = "auto") -> None:
        self.folder, self._strategy, self._world = folder, strategy, strategy.world
        self._lock: io.FileIO | None = None
        job = strategy.broadcast_object(uuid.uuid4().hex)
        is_first_of_host = self._world.local_rank == 0
        # Rank 0 first, so that it writes wherever the folder is shared with its host.
        for is_asked in (self._world.is_root, is_first_of_host and not self._world.is_root):
            with self._together():
                if is_asked:
                    self._lock = lock_folder(folder, job)
        self.is_writer = self._lock is not None
        """Whether this rank writes the copy of its host, or of the hosts that share the folder."""
        if self.is_writer:
            remove_partial(folder)
        is_shared = sum(strategy.all_gather_object(self.is_writer)) == 1 and self._world.size > 1
        self.parts = (
            tuple(map(part_name, range(self._world.size))) if is_shared and strategy.shards and files == "auto" else ()
        )
        """Names of the files that the ranks write parts of sharded tensors into; none where one file has them whole."""
        self.part = self.parts[self._world.rank] if self.parts else ""
        """The file that this rank writes its part into, or ""."""
        self.writes = self.is_writer or bool(self.parts)
        """Whether this rank writes a file of each checkpoint."""
        self.damaged: list[Path] = []
        """Checkpoints in this rank's folder that were passed over."""

    def find_start(self, resume: str | Path) -> tuple[Committed | None, int]:
        """Return the checkpoint that a run goes on from, where this rank can read it, or None; and this start's number.

        Args:
            resume: as in `CheckpointConfig`.

        Raises:
            ConfigError: the one that is named is damaged or not there, or the run is to start anew in a folder that is
                not empty; or the newest is of a later format.
            TrainerError: a host cannot keep a copy, or read what it has now. All are raised on every rank.
        """
        with self._together():
            orders = [order_of(path.name) for path in find(self.folder)] if self.is_writer else []
        attempt = max(self._strategy.all_gather_object(max((order[0] for order in orders if order), default=0)))
        if resume == "none":
            if attempt:
                raise ConfigError(
                    f"the folder {self.folder} holds checkpoints, and resume is 'none'; valid is 'auto', which goes on "
                    "from the newest, or another folder"
                )
            return None, 1
        here = self._find_newest()
        found = self._strategy.all_gather_object(here)
        chosen = max(filter(None, found), key=lambda checkpoint: checkpoint.order, default=None)
        # The one that is named is where the first start begins; a later start of the same command goes on.
        if resume != "auto" and (chosen is None or chosen.facts["resume"] != str(resume)):
            chosen = self._take_named(Path(resume))
        elif chosen is not None:
            chosen = self._spread(chosen, found.index(chosen), here)
        return chosen, max(attempt, chosen.order[0] if chosen else 0) + 1

    def close(self) -> None:
        """Let another job use the folder."""
        if self._lock is not None:
            self._lock.close()

    def _find_newest(self) -> Committed | None:
        """Return the newest valid checkpoint in the folder, on its writer; a damaged one is named in a warning."""
        with self._together():
            if not self.is_writer:
                return None
            paths = find(self.folder)
            here = newest(self.folder, self._warn, load_run)
            self.damaged = paths[: paths.index(here.path)] if here else paths
            return here

    def _take_named(self, path: Path) -> Committed:
        """Return the checkpoint at a path of rank 0's host: there if all hosts have it there, else in the folder."""
        here, is_first_of_host = None, self._world.local_rank == 0
        with self._together():
            try:
                here = load_run(path) if is_first_of_host else None
            except TrainerError as error:
                if self._world.is_root:
                    valid = "valid are auto, none, and the path of a checkpoint"
                    raise ConfigError(f"resume is {str(path)!r}, and {error}; {valid}") from None
        chosen: Committed = self._strategy.broadcast_object(here)
        lacks = is_first_of_host and (here is None or here.files != chosen.files)
        if not any(self._strategy.all_gather_object(lacks)):
            return replace(chosen, path=path)
        here = None
        with self._together(), suppress(DataError):
            here = load(self.folder / chosen.name) if self.is_writer else None
            if here is not None and here.files != chosen.files:
                raise ConfigError(f"{path} and {here.path} are two checkpoints of one name; give another folder")
        return self._spread(chosen, 0, here)

    def _spread(self, chosen: Committed, owner: int, here: Committed | None) -> Committed:
        """Return a checkpoint as it is in the folder, once rank `owner` has broadcast it to the hosts that lack it.

        Args:
            here: a checkpoint that this rank has in the folder, this one or another.
        """
        lacks = self.is_writer and (here is None or here.files != chosen.files)
        if any(self._strategy.all_gather_object(lacks)):
            chunks = self._broadcast(chosen, owner)
            with self._together():
                try:
                    if lacks:
                        self._receive(chosen, chunks, here)
                finally:
                    for _ in chunks:  # each rank takes part in all broadcasts, also one that could not write
                        pass
        return replace(chosen, path=self.folder / chosen.name)

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

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise an error of this context's on one rank on every rank: a user's mistake, or else the first rank's."""
        error: TrainerError | None = None
        try:
            yield
        except TrainerError as caught:
            error = caught
        named = name_rank(str(error), self._world.rank, self._world.size, self._world.host)
        found = self._strategy.all_gather_object((not isinstance(error, ConfigError), named) if error else None)
        is_no_mistake, text = min(filter(None, found), key=lambda told: told[0], default=(True, ""))
        if text:
            raise (TrainerError if is_no_mistake else ConfigError)(text)

    def _warn(self, problem: str) -> None:
        print_line(f"trainer: WARNING: on host {self._world.host}: {problem}", sys.stderr)


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
