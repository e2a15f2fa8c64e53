"""Hosts that were left out, and are back while the job runs without them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.ops.supervise.hosts import Host, slots_of
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.remote import Answer, on_all_hosts

_PROBE_S = 30.0


class Rejoin:
    """Asks the hosts that an attempt does without, in the background, where --take-back is set.

    Args:
        hosts: of the attempt.
        bad: hosts that are left out although they answer.
    """

    def __init__(self, options: Options, hosts: Sequence[Host], bad: Collection[str]) -> None:
        left_out = {host.name for host in hosts} | set(bad)
        too_few = options.take_back and slots_of(hosts) < options.ranks
        self._missing = [host for host in options.hosts if host.name not in left_out] if too_few else []
        self._pool = ThreadPoolExecutor(1)
        self._asked: Future[list[Answer]] | None = None
        self._asked_at = time.monotonic()

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reason(self) -> str:
        """Return which hosts are back, as a reason to start again with them; empty without one."""
        if not self._missing:
            return ""
        if self._asked is None and time.monotonic() - self._asked_at > _PROBE_S:
            self._asked = self._pool.submit(on_all_hosts, self._missing, "", "look")
        if self._asked is None or not self._asked.done():
            return ""
        back = [answer.host for answer in self._asked.result() if answer.is_well]
        self._asked, self._asked_at = None, time.monotonic()
        return f"{', '.join(back)} answers again, and is taken back" if back else ""
