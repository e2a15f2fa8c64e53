"""The program of a watcher, which ends when the ranks of its host have ended."""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import time

from trainer.cluster.output import warn
from trainer.ops.watcher.job import Host, Job
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import Hub, Spoke
from trainer.ops.watcher.wire import wait

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Schedulers and launchers send these to all processes of a job; the watcher ends when the ranks have."""
_TICK_S = 0.25
_SLEPT_S = 5.0
"""After a gap of this length between two ticks, the machine was suspended, or all of the job was stopped."""


def main() -> int:
    """Watch until the ranks of this host have ended.

    The settings are JSON on standard input: the fields of `Job`; "records", the path of each rank's heartbeat; and
    "listener", on the hub's host the descriptor of the socket to which other watchers connect.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the rank has had all of them blocked until here
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the hub has a connection to each host
    settings = json.loads(sys.stdin.buffer.read())
    ranks = LocalRanks({int(rank): path for rank, path in settings.pop("records").items()})
    if ranks.problems:
        rank, problem = next(iter(ranks.problems.items()))
        warn(f"hangs are not watched for on rank {rank}: {problem}")
    if not ranks.by_rank:
        return 0
    listener = next((socket.socket(fileno=descriptor) for descriptor in settings.pop("listener")), None)
    job = Job([Host(name, tuple(numbers)) for name, numbers in settings.pop("hosts")], **settings)
    try:
        _watch(Spoke(job, ranks) if job.number else Hub(job, ranks, listener), ranks)
    except Exception as error:  # a job does not end because nobody watches it
        warn(f"hangs are no longer watched for: {type(error).__name__}: {error}")
        return 1
    return 0


def _watch(watcher: Hub | Spoke, ranks: LocalRanks) -> None:
    before = _clock()
    while not ranks.are_gone:
        wait([*ranks.running, *watcher.sources], _TICK_S)
        now = _clock()
        if now - before > _SLEPT_S:
            watcher.postpone()
        watcher.tick()
        before = _clock()
        if watcher.verdict is not None:
            watcher.end()
            return
        # A tick reads a dozen files; messages that follow each other closely wait for the next one.
        time.sleep(_TICK_S / 5)
    watcher.leave()


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # which goes on while the machine is suspended


if __name__ == "__main__":
    sys.exit(main())
