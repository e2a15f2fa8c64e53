"""The watcher of one host, a process of its own: `python -m trainer.watch.watcher`, with its settings on stdin.

It ends with the ranks of its host, and outlives none of them. It has no PyTorch in it, so that it starts within 0.1 s.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from trainer.watch.hub import Hub
from trainer.watch.judge import Host
from trainer.watch.ranks import Address, LocalRanks
from trainer.watch.report import warn
from trainer.watch.spoke import Spoke

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Schedulers and launchers send these to all processes of a job; the watcher ends when the ranks have."""
_TICK_S = 0.25
_SLEPT_S = 5.0
"""After a gap of this length between two ticks, the machine was suspended, or all of the job was stopped."""


def main() -> int:
    """Watch until the ranks of this host have ended."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    settings = json.loads(sys.stdin.buffer.read())
    ranks = LocalRanks({int(rank): Address(**address) for rank, address in settings["addresses"].items()})
    if ranks.problems:
        rank, problem = next(iter(ranks.problems.items()))
        warn(f"hangs are not watched for on rank {rank}: {problem}")
    if not ranks.by_rank:
        return 0
    watcher = _make(settings, ranks)
    try:
        _watch(watcher, ranks)
    except Exception as error:  # a job does not end because nobody watches it
        warn(f"hangs are no longer watched for: {type(error).__name__}: {error}")
        return 1
    return 0


def _make(settings: Mapping[str, Any], ranks: LocalRanks) -> Hub | Spoke:
    hosts = [Host(host["name"], tuple(host["ranks"])) for host in settings["hosts"]]
    number, token, given_s, script = settings["host"], settings["token"], settings["given_s"], settings["script"]
    if number == 0:
        listener = socket.socket(fileno=settings["listener"]) if settings["listener"] >= 0 else None
        return Hub(hosts, ranks, listener, token, given_s, script)
    return Spoke(hosts, number, ranks, settings["endpoint"], token, given_s, script)


def _watch(watcher: Hub | Spoke, ranks: LocalRanks) -> None:
    before = _clock()
    while not ranks.are_gone:
        select.select([*ranks.running, *watcher.readers], watcher.writers, [], _TICK_S)
        now = _clock()
        if now - before > _SLEPT_S:
            watcher.postpone()
        watcher.tick()
        before = _clock()
        if watcher.verdict is not None or (isinstance(watcher, Spoke) and watcher.must_end):
            watcher.end()
            return
        # A tick reads a dozen files; messages that follow each other closely wait for the next one.
        time.sleep(_TICK_S / 5)
    watcher.leave()


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # which goes on while the machine is suspended


if __name__ == "__main__":
    sys.exit(main())
