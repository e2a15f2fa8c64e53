"""Storage: which ranks write a checkpoint, where the newest one is, and how every host gets it.

One rank on each host keeps a copy on its host's disk, unless another host that has the same folder, on a shared file
system, does so already. So the loss of a host loses no checkpoint, whatever the hosts share. No copy has to be sent
while the training runs, because every rank holds the same weights. And each copy is complete, so that committing needs
no agreement between hosts. At start, hosts that lack the newest one get it from one that has it.

Where ranks hold parts of the weights and share one folder, each of them may write its part.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint.disk.commit import prune, receive, remove_partial
from trainer.checkpoint.disk.committed import MANIFEST, Committed, find, load, newest, order_of, send
from trainer.checkpoint.disk.lock import FolderLock
from trainer.checkpoint.disk.state_files import part_name
from trainer.cluster.network import host_id
from trainer.cluster.output import print_line
from trainer.errors import ConfigError, DataError, TrainerError, name_rank
from trainer.strategies.base import Strategy


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
    """The checkpoints' folder, as the ranks of this job see it. Its methods are collective, unless they say otherwise.

    Args:
        folder: the same path on every host; made where it is missing.
        files: one of `trainer.config.CHECKPOINT_FILES`.

    Raises:
        TrainerError: it cannot be written on some host, or another job uses it; raised on every rank.
    """

    def __init__(self, folder: Path, strategy: Strategy, files: str = "auto") -> None:
        self.folder, self._strategy, self._world = folder, strategy, strategy.world
        self._lock = FolderLock(folder, job=strategy.broadcast_object(uuid.uuid4().hex))
        hosts = strategy.all_gather_object(host_id())
        self._first_of_host = hosts.index(host_id())
        self._is_first_of_host = self._first_of_host == self._world.rank
        # Rank 0 first, so that it writes wherever the folder is shared with its host.
        self.raise_together(self._lock.acquire() if self._world.is_root else "")
        self.raise_together(self._lock.acquire() if self._is_first_of_host and not self._world.is_root else "")
        self.is_writer = self._lock.is_held
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
        self._copy: Path | None = None
        self.damaged: list[Path] = []
        """Checkpoints in this rank's folder that `newest` has passed over."""

    def find_start(self, resume: str | Path) -> tuple[Committed | None, int]:
        """Return the checkpoint that a run goes on from, on this host's disk, or None; and the number of this start.

        Args:
            resume: as in `CheckpointConfig`.

        Raises:
            ConfigError: the one that is named is damaged or not there, or the run is to start anew in a folder that is
                not empty; or the newest is of a later format.
            TrainerError: a host cannot keep a copy, or read what it has now. All are raised on every rank.
        """
        with self._together():
            orders = [order_of(path.name) for path in find(self.folder)] if self.is_writer else []
        attempts = self._strategy.all_gather_object(max((order[0] for order in orders if order), default=0))
        if resume == "none":
            if any(attempts):
                raise ConfigError(
                    f"the folder {self.folder} holds checkpoints, and resume is 'none'; valid is 'auto', which goes on "
                    "from the newest, or another folder"
                )
            return None, 1
        checkpoint = self.newest()
        # The one that is named is where the first start begins; a later start of the same command goes on.
        if resume != "auto" and (checkpoint is None or checkpoint.facts["resume"] != str(resume)):
            checkpoint = self.at(Path(resume))
        return checkpoint, max([*attempts, checkpoint.order[0] if checkpoint else 0]) + 1

    def newest(self) -> Committed | None:
        """Return the newest valid checkpoint of all hosts, which is on each of them afterwards.

        A damaged one is named in a warning, and passed over.

        Raises:
            TrainerError: a host cannot keep a copy, or read what it has now; raised on every rank.
            ConfigError: it is of a later format; raised on every rank.
        """
        here = None
        with self._together():
            if self.is_writer:
                paths = find(self.folder)
                here = newest(self.folder, self._warn, load_run)
                self.damaged = paths[: paths.index(here.path)] if here else paths
        orders = self._strategy.all_gather_object(here.order if here else None)
        newest_order = max((order for order in orders if order is not None), default=None)
        if newest_order is None:
            return None
        owner = orders.index(newest_order)
        chosen: Committed = self._strategy.broadcast_object(here, root=owner)
        lacks = self.is_writer and (here is None or here.files != chosen.files)
        if here is not None and lacks and here.order == newest_order:
            # A host that was cut off has trained these updates too, and not with the same samples on each rank.
            prune(self.folder, [path for path in find(self.folder) if path != here.path])
        self._send(here, owner, self.folder if lacks else None)
        return replace(chosen, path=self.folder / chosen.path.name)

    def at(self, path: Path) -> Committed:
        """Return the checkpoint at a path of rank 0's host, of which other hosts get a copy for this start.

        Raises:
            ConfigError: it is damaged, or there is none; raised on every rank.
        """
        here, problem = None, ""
        if self._is_first_of_host:
            try:
                here = load_run(path)
            except TrainerError as error:
                problem = f"resume is {str(path)!r}, and {error}; valid are auto, none, and the path of a checkpoint"
        self.raise_together(problem if self._world.is_root else "", ConfigError)
        chosen: Committed = self._strategy.broadcast_object(here)
        into = None
        if self._is_first_of_host and (here is None or here.files != chosen.files):
            into = self._copy = Path(tempfile.mkdtemp(prefix="trainer-checkpoint-"))
        self._send(here, 0, into)
        places = self._strategy.all_gather_object(into / path.name if into else path)
        return replace(chosen, path=places[self._first_of_host])

    def signal_writer(self) -> None:
        """Send this host's writer SIGUSR2. Not collective."""
        self._lock.signal_holder(signal.SIGUSR2)

    def discard_copy(self) -> None:
        """Remove the copy that `at` has made for this start, when every rank has read it."""
        self._strategy.barrier()
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)

    def close(self) -> None:
        """Let another job use the folder."""
        self._lock.release()

    def _send(self, here: Committed | None, owner: int, into: Path | None) -> None:
        """Send a checkpoint to the ranks that name a folder for it; every rank takes part in each chunk's broadcast."""
        if not any(self._strategy.all_gather_object(into is not None)):
            return
        sent = send(here.path) if here is not None and self._world.rank == owner else iter(())
        chunks = iter(lambda: self._strategy.broadcast_object(next(sent, b""), root=owner), b"")
        problem = ""
        if into is not None:
            try:
                receive(into, chunks)
            except TrainerError as error:
                problem = str(error)
        for _ in chunks:  # all of them on a rank that only takes part, the rest on one that could not write
            pass
        self.raise_together(problem)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise an error of this context's on one rank on every rank. Collective."""
        problem, is_mistake = "", False
        try:
            yield
        except TrainerError as error:
            problem, is_mistake = str(error), isinstance(error, ConfigError)
        self.raise_together(problem if is_mistake else "", ConfigError)
        self.raise_together(problem)

    def raise_together(self, problem: str, kind: type[TrainerError] = TrainerError) -> None:
        """Raise the first rank's problem on every rank, if one has any."""
        for rank, (host, text) in enumerate(self._strategy.all_gather_object((self._world.host, problem))):
            if text:
                raise kind(name_rank(text, rank, self._world.size, host))

    def _warn(self, problem: str) -> None:
        print_line(f"trainer: WARNING: on host {self._world.host}: {problem}", sys.stderr)
