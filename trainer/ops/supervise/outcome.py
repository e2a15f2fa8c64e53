"""Judge how an attempt has ended, and which hosts are to blame, from exit codes and heartbeats."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from trainer.cluster import exit_codes
from trainer.ops.supervise.hosts import Host, names
from trainer.watch.heartbeat import DONE, LOST_PEER, MISTAKE, PREEMPTED, Heartbeat
from trainer.watch.job_folder import DIFFERENT, HANG, JobVerdict

# 2 is argparse's code; 126 and 127 are a shell's for a command that it cannot run, or does not find.
_MISTAKES = (exit_codes.MISTAKE, 2, 126, 127)


class Verdict(StrEnum):
    """How an attempt has ended."""

    DONE = "done"
    PREEMPTED = "preempted"
    MISTAKE = "mistake"
    FAILED = "failed"
    HUNG = "hung"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was seen of an attempt."""

    launcher: str
    codes: Sequence[int] = ()
    """Exit codes of the launcher's processes, negative for a signal; empty if they had to be ended."""
    ranks: Mapping[int, Heartbeat] = field(default_factory=dict)
    host_of: Mapping[int, str] = field(default_factory=dict)
    """The hosts of the ranks, as -H names them."""
    verdict: JobVerdict | None = None
    """What the watch has found out about the job."""
    dead: Sequence[int] = ()
    """Ranks whose processes died first."""
    ended: Sequence[int] = ()
    """Ranks that had ended in good order before that."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Hosts of the attempt that did not answer afterwards, and why."""
    idle_s: float | None = None
    """Seconds without progress, if the attempt was ended because of them."""
    is_preempted: bool = False
    """Whether the ranks were asked to save and end, because `trainer run` itself has to."""
    was_interrupted: bool = False


@dataclass(frozen=True)
class Judgement:
    """How an attempt has ended."""

    verdict: Verdict
    text: str
    hosts: tuple[str, ...] = ()
    """Hosts that are to blame."""
    code: int = 1
    """Exit code of `trainer run` if this attempt is the last."""
    is_last: bool = False
    """Whether the job is not to be started again."""
    may_be_network: bool = False
    """Whether a host, or the network between hosts, may be the cause."""


@dataclass
class Times:
    """Moments of an attempt on this host's monotonic clock; None for what has not happened."""

    started: float
    joined: float | None = None
    first_update: float | None = None
    progress: float | None = None
    """Time of the most recent progress of any rank."""
    detected: float | None = None
    ended: float | None = None
    """From when on no process of the attempt was left."""


@dataclass
class Attempt:
    """A start of the job on some hosts, and how it went."""

    hosts: tuple[Host, ...]
    """The hosts, with the ranks that each of them had."""
    job: str
    times: Times
    wall_clock: float
    judgement: Judgement = Judgement(Verdict.INTERRUPTED, "interrupted", is_last=True)
    updates: tuple[int, int] | None = None
    """The first and the last completed update; None where it completed none."""


def judge(facts: Facts) -> Judgement:
    """Return how the attempt has ended."""
    if facts.was_interrupted:
        return Judgement(Verdict.INTERRUPTED, "interrupted", is_last=True)
    if facts.codes and not any(facts.codes):
        return Judgement(Verdict.DONE, "done", code=0, is_last=True)
    if facts.is_preempted:
        return Judgement(Verdict.PREEMPTED, "preempted", code=exit_codes.PREEMPTED, is_last=True)
    if facts.verdict is not None and facts.verdict.kind == HANG:
        return _judge_verdict(facts, facts.verdict)
    if mistaken := _with_error(facts, MISTAKE):
        text = f"{_name(facts, mistaken[0])}: {facts.ranks[mistaken[0]].message}"
        return Judgement(Verdict.MISTAKE, text, code=exit_codes.MISTAKE, is_last=True)
    if mistakes := [code for code in facts.codes if code in _MISTAKES]:
        return Judgement(
            Verdict.MISTAKE, f"{facts.launcher} has ended with code {mistakes[0]}", code=mistakes[0], is_last=True
        )
    if facts.idle_s is not None:
        return _judge_hang(facts, facts.idle_s)
    # A launcher that ends a job after a rank has died sends SIGTERM to the others, and those save.
    saved = bool(facts.ranks) and all(rank.phase == PREEMPTED for rank in facts.ranks.values())
    if exit_codes.PREEMPTED in facts.codes or saved:
        return Judgement(Verdict.PREEMPTED, "the ranks have saved, and want to be started again")
    return _blame(facts)


def hint(judgement: Judgement, hosts: Sequence[Host]) -> str:
    """Return a line that names the command which looks for the cause; empty if it would find none."""
    if not judgement.may_be_network or all(host.is_here for host in hosts):
        return ""
    return f"`trainer doctor -H {names(hosts)}` looks for the cause on these hosts and between them"


def _judge_hang(facts: Facts, idle_s: float) -> Judgement:
    oldest = min((rank.updates, rank.reports) for rank in facts.ranks.values())
    behind = [number for number, rank in sorted(facts.ranks.items()) if (rank.updates, rank.reports) == oldest]
    who = ", ".join(f"{_name(facts, number)} ({facts.ranks[number].phase})" for number in behind[:8])
    hosts = tuple(sorted({facts.host_of[number] for number in behind}))
    text = f"no progress for {idle_s:.0f} s; furthest behind: {who}, in update {oldest[0] + 1}"
    if len(behind) < len(facts.ranks):
        return Judgement(Verdict.HUNG, text, hosts)
    return Judgement(Verdict.HUNG, text, may_be_network=True)


def _judge_verdict(facts: Facts, verdict: JobVerdict) -> Judgement:
    hosts = {facts.host_of[rank] for rank in verdict.culprits if rank in facts.host_of}
    if len(hosts) == len(set(facts.host_of.values())) > 1:
        return Judgement(Verdict.HUNG, verdict.text, may_be_network=True)
    return Judgement(Verdict.HUNG, verdict.text, tuple(sorted(hosts)), may_be_network=not hosts)


def _blame(facts: Facts) -> Judgement:
    if facts.lost:
        text = "; ".join(f"host {host} is lost: {why}" for host, why in facts.lost.items())
        return Judgement(Verdict.FAILED, text, tuple(facts.lost), may_be_network=True)
    # Different collectives explain that ranks have lost one another; they do not explain another error of a rank.
    follows = any(rank.error in ("", LOST_PEER) for rank in facts.ranks.values())
    if facts.verdict is not None and facts.verdict.kind == DIFFERENT and follows:
        return Judgement(Verdict.FAILED, facts.verdict.text)
    failed = [number for number, rank in sorted(facts.ranks.items()) if rank.error not in ("", LOST_PEER)]
    if failed:
        rank = facts.ranks[failed[0]]
        what = f"{rank.error}: {rank.message}" if rank.message else rank.error
        text = f"{_name(facts, failed[0])} failed{_when(rank)}: {what.splitlines()[0][:200]}"
        return Judgement(Verdict.FAILED, text, (facts.host_of[failed[0]],))
    # A rank that has lost another rank ends too, and may be the first whose end was seen.
    if silent := [number for number in facts.dead if not facts.ranks[number].has_ended]:
        return _blame_silent(facts, silent)
    killed = [-code for code in facts.codes if code < 0]
    if killed:
        return Judgement(Verdict.FAILED, f"{facts.launcher} was ended by {signal.Signals(killed[0]).name}")
    lost = _with_error(facts, LOST_PEER)
    if lost and not _signal(facts.codes):
        return _blame_none(facts, lost)
    code = next((code for code in facts.codes if code), 1)
    joined = "" if facts.ranks else ", before a rank had joined"
    text = f"{facts.launcher} has ended with code {code}{_signal(facts.codes)}{joined}"
    return Judgement(Verdict.FAILED, text, may_be_network=True)


def _blame_silent(facts: Facts, silent: Sequence[int]) -> Judgement:
    text = f"{_names(facts, silent)} died without a word{_when(facts.ranks[silent[0]])}{_signal(facts.codes)}"
    if ended := [number for number in facts.ended if not facts.ranks[number].error]:
        # They may have called sys.exit, after which a launcher ends the others; no host is to blame.
        return Judgement(Verdict.FAILED, f"{text}, after {_names(facts, ended)} had ended")
    return Judgement(Verdict.FAILED, text, tuple(sorted({facts.host_of[number] for number in silent})))


def _blame_none(facts: Facts, lost: Sequence[int]) -> Judgement:
    """Judge an attempt in which all reported failures follow from a failure that nobody has reported."""
    text = f"{_names(facts, lost[:8])} lost another rank{_when(facts.ranks[lost[0]])}"
    ended = [number for number, rank in sorted(facts.ranks.items()) if rank.phase == DONE and not rank.error]
    if ended:
        return Judgement(Verdict.FAILED, f"{text}, after {_names(facts, ended[:8])} had ended")
    return Judgement(Verdict.FAILED, text, may_be_network=True)


def _with_error(facts: Facts, error: str) -> list[int]:
    return [number for number, rank in sorted(facts.ranks.items()) if rank.error == error]


def _names(facts: Facts, numbers: Sequence[int]) -> str:
    return " and ".join(_name(facts, number) for number in numbers)


def _name(facts: Facts, number: int) -> str:
    return f"rank {number} on {facts.host_of[number]}"


def _when(rank: Heartbeat) -> str:
    return f" in update {rank.updates + 1}" if rank.first_update else " before its first update"


def _signal(codes: Sequence[int]) -> str:
    # mpirun tells the signal that has ended a rank, as a shell does.
    for code in codes:
        if code > 128 and code - 128 in set(signal.Signals):
            return f" ({signal.Signals(code - 128).name})"
    return ""
