"""Hosts that were left out, and are back while the job runs without them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainer.ops.supervise.hosts import Host, slots_of
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.remote import Inquiry

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
        missing = [host for host in options.hosts if host.name not in left_out] if too_few else []
        self._inquiry = Inquiry(missing, "", _PROBE_S) if missing else None

    def close(self) -> None:
        """Ask no more."""
        if self._inquiry is not None:
            self._inquiry.close()

    def reason(self) -> str:
        """Return which hosts are back, as a reason to start again with them; empty without one."""
        answers = self._inquiry.answers() if self._inquiry is not None else []
        back = [answer.host for answer in answers if answer.is_well]
        return f"{', '.join(back)} answers again, and is taken back" if back else ""
