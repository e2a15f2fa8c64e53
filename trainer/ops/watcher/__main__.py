"""The program of a watcher, which ends when the ranks of its host have ended."""

from __future__ import annotations

import json
import select
import signal
import sys
import time

from trainer.cluster.output import warn
from trainer.ops.watcher.job import Settings
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import Watcher

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Schedulers and launchers send these to all processes of a job; the watcher ends when the ranks have."""
_TICK_S = 0.3
_SLEPT_S = 5.0
"""After a gap of this length between two ticks, the machine was suspended, or all of the job was stopped."""


def main() -> int:
    """Watch until the ranks of this host have ended.

    The settings are JSON on standard input: the fields of `Settings`, and "records", the path of each rank's heartbeat.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the rank has had all of them blocked until here
    settings = json.loads(sys.stdin.buffer.read())
    ranks = LocalRanks({int(rank): path for rank, path in settings.pop("records").items()})
    if ranks.problems:
        rank, problem = next(iter(ranks.problems.items()))
        warn(f"hangs are not watched for on rank {rank}: {problem}")
    if not ranks.by_rank:
        return 0
    try:
        _watch(Watcher(Settings(**settings), ranks), ranks)
    except Exception as error:  # a job does not end because nobody watches it
        warn(f"hangs are no longer watched for: {type(error).__name__}: {error}")
        return 1
    return 0


def _watch(watcher: Watcher, ranks: LocalRanks) -> None:
    before = _clock()
    while not ranks.are_gone:
        select.select(ranks.running, [], [], _TICK_S)
        now = _clock()
        if now - before > _SLEPT_S:
            watcher.postpone()
        watcher.tick()
        before = _clock()
        if watcher.verdict is not None:
            watcher.end()
            return
    watcher.leave()


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # which goes on while the machine is suspended


if __name__ == "__main__":
    sys.exit(main())
