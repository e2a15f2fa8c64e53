"""Workers of a loader, which the signal that announces a preemption does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from torch.utils.data import Dataset, IterableDataset

from trainer.data.batches import usr2_blocked
from trainer.data.loader import ShardedLoader
from trainer.data.stream import StreamLoader


class Signalled(Dataset[int]):
    """A sample whose worker gets the signal."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGUSR2)
        return index + 7


class SignalledStream(IterableDataset[int]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[int]:
        yield Signalled()[0]


STARTED = """
import multiprocessing, signal
from trainer.data.batches import usr2_blocked

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=signal.raise_signal, args=(signal.SIGUSR2,))
        with usr2_blocked():
            process.start()
        process.join()
        print(method, process.exitcode)
"""


@pytest.mark.distributed
def test_a_process_is_not_ended_by_the_signal_however_it_is_started() -> None:
    # In a process of its own, with which the server of forkserver ends.
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "fork 0\nspawn 0\nforkserver 0\n"


def test_the_process_that_starts_them_gets_the_signal_afterwards() -> None:
    came: list[int] = []
    earlier = signal.signal(signal.SIGUSR2, lambda number, _: came.append(number))
    try:
        with usr2_blocked():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            assert came == []
        assert came == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, earlier)


@pytest.mark.parametrize(
    "loader", [ShardedLoader(Signalled(), 1, num_workers=1), StreamLoader(SignalledStream(), 1, num_workers=1)]
)
def test_the_workers_of_a_loader_are_started_so(loader: ShardedLoader | StreamLoader) -> None:
    assert [batch.tolist() for batch in loader] == [[7]]
