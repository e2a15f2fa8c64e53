"""The program of a watcher, which ends when the ranks of its host have ended."""

from __future__ import annotations

import json
import select
import signal
import sys

from trainer.cluster.output import warn
from trainer.ops.watcher.job import Settings
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import Watcher

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Schedulers and launchers send these to all processes of a job; the watcher ends when the ranks have."""
_TICK_S = 0.3


def main() -> int:
    """Watch until the ranks of this host have ended. The settings are JSON, the program's argument."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    settings = Settings(**json.loads(sys.argv[1]))
    ranks = LocalRanks({int(rank): path for rank, path in settings.records.items()})
    try:
        _watch(Watcher(settings, ranks), ranks)
    except Exception as error:  # a job does not end because nobody watches it
        warn(f"hangs are no longer watched for: {type(error).__name__}: {error}")
        return 1
    return 0


def _watch(watcher: Watcher, ranks: LocalRanks) -> None:
    while watcher.verdict is None and (running := ranks.running):
        select.select(running, [], [], _TICK_S)
        watcher.tick()
    if watcher.verdict is None:
        watcher.tick()  # says why the job has failed, by what its ranks did last


if __name__ == "__main__":
    sys.exit(main())
