"""An attempt, which is a start of the job: what was seen of it, how it has ended, and which hosts are to blame."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainer.cluster import exit_codes
from trainer.errors import named_ranks
from trainer.ops.supervise.hosts import Host, names, slots_of
from trainer.ops.verdict import DIFFERENT, HANG, JobVerdict
from trainer.watch.heartbeat import DONE, LOST_PEER, MISTAKE, PREEMPTED, Heartbeat

# 2 is argparse's code; 126 and 127 are a shell's for a command that it cannot run, or does not find.
_MISTAKES = (exit_codes.MISTAKE, 2, 126, 127)
OURS = signal.SIGVTALRM
"""The signal that ends the ranks which a dead rank leaves behind, at once and unlike any other: a launcher's code tells
how the dead rank has ended, or else how the others have."""
_SIGNALS = {128 + number: f" ({number.name})" for number in signal.Signals if number != OURS}


@dataclass(frozen=True)
class Judgement:
    """How an attempt has ended."""

    verdict: Literal["done", "preempted", "mistake", "failed", "hung", "interrupted"]
    text: str
    hosts: tuple[str, ...] = ()
    """Hosts that are to blame."""
    code: int | None = None
    """Exit code of `trainer run`, because the job is not to be started again; None where it is."""


@dataclass(kw_only=True)
class Attempt:
    """A start of the job on some hosts. Moments are on this host's monotonic clock; None for what has not happened."""

    hosts: tuple[Host, ...]
    """The hosts, with the ranks that each of them had."""
    launcher: str = "horovodrun"
    judgement: Judgement = Judgement("interrupted", "interrupted", code=1)
    started_at: float = field(default_factory=time.monotonic)
    joined_at: float | None = None
    first_update_at: float | None = None
    progress_at: float = field(default_factory=time.monotonic)
    """Time of the most recent progress of any rank, before the failure was seen."""
    detected_at: float | None = None
    ended_at: float | None = None
    """From when on no process of the attempt was left."""

    ranks: dict[int, Heartbeat] = field(default_factory=dict)
    host_of: dict[int, str] = field(default_factory=dict)
    """The hosts of the ranks, as -H names them."""
    dead: Sequence[int] = ()
    """Ranks whose processes died first."""
    left: Sequence[int] = ()
    """Ranks that had ended in good order before that."""
    codes: Sequence[int] = ()
    """Exit codes of the launcher's processes, as a shell tells them; empty if they had to be ended."""
    verdict: JobVerdict | None = None
    """What the watch has found out about the job."""
    lost: dict[str, str] = field(default_factory=dict)
    """Hosts that did not answer, or cannot take the job, and why."""
    full: str = ""
    """Hosts whose folders for temporary files take nothing, without which Open MPI does not start."""
    idle_s: float | None = None
    """Seconds without progress, if the attempt was ended because of them."""
    is_preempted: bool = False
    """Whether the ranks were asked to save and end, because `trainer run` itself has to."""
    was_interrupted: bool = False

    @property
    def updates(self) -> tuple[int, int] | None:
        """The first and the last completed update; None where it completed none."""
        counted = [rank for rank in self.ranks.values() if rank.first_update]
        return (min(rank.first_update for rank in counted), max(rank.updates for rank in counted)) if counted else None

    def name(self, numbers: Sequence[int]) -> str:
        """Return ranks with their hosts."""
        return " and ".join(f"rank {number} on {self.host_of[number]}" for number in sorted(numbers)[:8])

    def when(self, number: int) -> str:
        """Return in which update a rank was."""
        rank = self.ranks[number]
        return f" in update {rank.updates + 1}" if rank.first_update else " before its first update"

    def hosts_of(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """Return the hosts of ranks."""
        return tuple(sorted({self.host_of[number] for number in numbers if number in self.host_of}))

    def to_blame(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """Return the hosts of ranks; none where these are all hosts of several, of which nobody can say which it is."""
        hosts = self.hosts_of(numbers)
        return () if len(hosts) == len({*self.host_of.values()}) > 1 else hosts

    @property
    def advice(self) -> str:
        """What to do where a host, or the network between hosts, may be the cause."""
        if all(host.is_here for host in self.hosts):
            return ""
        return f"; `trainer doctor -H {names(self.hosts)}` looks for the cause on these hosts and between them"


def judge(attempt: Attempt) -> Judgement:
    """Return how an attempt has ended."""
    judgement = _judge(attempt)
    if attempt.full and judgement.code is None and attempt.updates is None:
        judgement = replace(judgement, text=f"{judgement.text}; {attempt.full}")
    if not attempt.is_preempted or judgement.code is not None:
        return judgement
    if judgement.verdict == "preempted" or attempt.updates is None:  # else something would be lost
        return Judgement("preempted", "preempted", code=exit_codes.PREEMPTED)
    return replace(judgement, text=f"preempted, and not saved: {judgement.text}", code=1)


def _judge(attempt: Attempt) -> Judgement:
    """Return how an attempt has ended by itself: the first of these rules that applies says it."""
    codes, ranks = attempt.codes, attempt.ranks
    mistaken = [number for number, rank in sorted(ranks.items()) if rank.error == MISTAKE]
    if attempt.was_interrupted:
        return Judgement("interrupted", "interrupted", code=1)
    if codes and not any(codes):
        return Judgement("done", "done", code=0)
    if mistaken:
        text = f"{attempt.name(mistaken[:1])}: {ranks[mistaken[0]].message}"
        return Judgement("mistake", text, code=exit_codes.MISTAKE)
    if mistake := next((code for code in codes if code in _MISTAKES), 0):
        return Judgement("mistake", f"{attempt.launcher} has ended with code {mistake}", code=mistake)
    if attempt.verdict is not None and attempt.verdict.kind == HANG:
        return _hung(attempt, attempt.verdict.text, attempt.verdict.culprits)
    if attempt.idle_s is not None:
        return _idle(attempt, attempt.idle_s)
    # A launcher that ends a job after a rank has died sends SIGTERM to the others, and those save.
    if exit_codes.PREEMPTED in codes or (ranks and all(rank.phase == PREEMPTED for rank in ranks.values())):
        return Judgement("preempted", "the ranks have saved, and want to be started again")
    return _blame(attempt)


def _hung(attempt: Attempt, text: str, culprits: Sequence[int]) -> Judgement:
    hosts = attempt.to_blame(culprits)
    return Judgement("hung", text + attempt.advice * (not hosts), hosts)


def _idle(attempt: Attempt, idle_s: float) -> Judgement:
    missing = sorted({*range(slots_of(attempt.hosts))} - {*attempt.ranks})
    if missing and all(rank.phase == "joining" for rank in attempt.ranks.values()):
        who = f"not all ranks have (not {', '.join(map(str, missing[:8]))})" if attempt.ranks else "no rank has"
        hint = "" if attempt.ranks else " (--timeout is for scripts that do, and with a /tmp that this process sees)"
        return _hung(attempt, f"no progress for {idle_s:.0f} s: {who} come to trainer.init{hint}", ())
    place = {number: (rank.updates, rank.reports) for number, rank in sorted(attempt.ranks.items())}
    oldest = min(place.values())
    behind = [number for number in place if place[number] == oldest]
    who = ", ".join(f"{attempt.name([number])} ({attempt.ranks[number].phase})" for number in behind[:8])
    text = f"no progress for {idle_s:.0f} s; furthest behind: {who}, in update {oldest[0] + 1}"
    return _hung(attempt, text, behind if len(behind) < len(place) else ())


def _blame(attempt: Attempt) -> Judgement:
    ranks, watch = attempt.ranks, attempt.verdict
    errors = {number: rank.error for number, rank in sorted(ranks.items()) if rank.error}
    own = [number for number, error in errors.items() if error != LOST_PEER]
    by_signal = next((_SIGNALS[code] for code in attempt.codes if code in _SIGNALS), "")
    if attempt.lost:
        text = "; ".join(f"host {host} is lost: {why}" for host, why in attempt.lost.items())
        return Judgement("failed", text + attempt.advice, tuple(attempt.lost))
    # Different collectives explain that ranks have lost one another; they do not explain another error of a rank.
    if watch is not None and watch.kind == DIFFERENT and len(own) < len(ranks):
        return Judgement("failed", watch.text)
    if own:
        what = ": ".join(filter(None, (errors[own[0]], ranks[own[0]].message))).splitlines()[0][:200]
        # All ranks raise what they find out together. Of several that it names, nobody can say which is to blame.
        named = [number for number in named_ranks(ranks[own[0]].message) if number in ranks]
        text = f"{attempt.name(named or own[:1])} failed{attempt.when(own[0])}: {what}"
        return Judgement("failed", text, attempt.to_blame(named or own) if len(named) < 2 else ())
    # A rank that has lost another rank ends too, and may be the first whose end was seen.
    if silent := [number for number in attempt.dead if not ranks[number].has_ended]:
        text = f"{attempt.name(silent)} died without a word{attempt.when(silent[0])}{by_signal}"
        return _after(attempt, text, attempt.left, Judgement("failed", text, attempt.to_blame(silent)))
    if errors and not by_signal:  # and all follow from a failure that nobody has reported
        text = f"{attempt.name([*errors])} lost another rank{attempt.when(next(iter(errors)))}"
        done = [number for number, rank in ranks.items() if rank.phase == DONE]
        return _after(attempt, text, done, Judgement("failed", text + attempt.advice))
    code = next(filter(None, attempt.codes), 1)
    text = f"{attempt.launcher} has ended with code {code}{by_signal}{'' if ranks else ', before a rank had joined'}"
    return Judgement("failed", text + ("" if by_signal else attempt.advice))


def _after(attempt: Attempt, text: str, left: Sequence[int], judgement: Judgement) -> Judgement:
    """Return a judgement that blames no host where ranks had ended before, in good order, else the given one.

    They may have called sys.exit, after which a launcher ends the others.
    """
    left = [number for number in left if not attempt.ranks[number].error]
    return Judgement("failed", f"{text}, after {attempt.name(left)} had ended") if left else judgement
