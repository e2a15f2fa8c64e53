"""What is done on every host of a job: find its processes, signal or kill them, and read its folder.

One shell script does it, on this host and through ssh on the others, so that a host needs no Python for it. A host that
does not answer in time is not well: the same call is the probe.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from trainer.ops.supervise.hosts import Host
from trainer.watch.heartbeat import SIZE, Heartbeat
from trainer.watch.job_folder import JOB, SIGTERM, VERDICT, JobVerdict, parse_verdict

Action = Literal["look", "preempt", "kill"]
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_HEAD = re.compile(rb"trainer-host(?: [0-9]{1,7})*")
_SIGTERM = re.compile(rb'\{"sigterm": ([0-9]{1,7})\}\n')
TIMEOUT_S = 10.0
"""Seconds in which all hosts together have to answer, once the last one was called."""
# /proc shows the environment that a process was started with, so the mark stays. A process may be made while others are
# killed, so killing is repeated. A heartbeat's process is preempted only if it carries the mark, because its number may
# belong to another process by now.
SCRIPT = (
    r"""
job=$1 action=$2
shift 2
marked() {
    for file in $(grep -lsF "JOB=$job" /proc/[0-9]*/environ); do
        file=${file#/proc/}
        echo "${file%/environ}"
    done
}
processes=$(marked)
echo "trainer-host" $processes
if [ "$action" = kill ]; then
    left=$processes tries=0
    while [ -n "$left" ] && [ $tries -lt 50 ]; do
        kill -9 $left 2> /dev/null
        sleep 0.05 2> /dev/null || sleep 1
        left=$(marked) tries=$((tries + 1))
    done
fi
for folder in "$@"; do
    folder=$folder/trainer-$(id -u)-$job
    [ -O "$folder" ] && [ ! -L "$folder" ] || continue
    for file in "$folder"/rank-*; do
        if [ "$action" = preempt ]; then
            read -r mark process rest < "$file"
            grep -qsF "JOB=$job" "/proc/$process/environ" && kill -USR2 "$process"
        fi
        cat "$file"
        number=${file##*-}
        [ ! -s "$folder/SIGTERM-$number" ] || echo "{\"sigterm\": $number}"
    done
    [ ! -f "$folder/VERDICT" ] || cat "$folder/VERDICT"
    [ "$action" != kill ] || rm -rf "$folder"
done
""".replace("JOB", JOB)
    .replace("VERDICT", VERDICT)
    .replace("SIGTERM", SIGTERM)
)


@dataclass(frozen=True)
class Answer:
    """What a host has answered."""

    host: str
    is_well: bool
    processes: frozenset[int] = frozenset()
    """Processes of the job that were running."""
    ranks: tuple[Heartbeat, ...] = ()
    verdict: JobVerdict | None = None
    """What the host's watcher has found out."""
    problem: str = ""
    """Why the host is not well."""


def on_all_hosts(hosts: Sequence[Host], job: str, action: Action, timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """Look for the processes of a job on all hosts at once, signal or kill them; return the answers in their order.

    "kill" also removes the job's folder. With an empty job, the call only probes whether the hosts answer.
    """
    started = [(host, _start(host, job, action)) for host in hosts]
    deadline = time.monotonic() + timeout_s  # no host is to blame for the time in which the others are called
    return [_read(host, process, deadline) for host, process in started]


class Inquiry:
    """Looks at the hosts of a job in the background, if there are any, again and again.

    Args:
        every_s: seconds from an answer to the next look.
    """

    def __init__(self, hosts: Sequence[Host], job: str, every_s: float) -> None:
        self._hosts, self._job, self._every_s = hosts, job, every_s
        self._pool = ThreadPoolExecutor(1)
        self._asked: Future[list[Answer]] | None = None
        self._asked_at = time.monotonic()

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def answers(self) -> list[Answer]:
        """Return the answers that have come since the last call, and look again if it is time to."""
        now = time.monotonic()
        if self._hosts and self._asked is None and now - self._asked_at > self._every_s:
            self._asked = self._pool.submit(on_all_hosts, self._hosts, self._job, "look")
        if self._asked is None or not self._asked.done():
            return []
        answers, self._asked, self._asked_at = self._asked.result(), None, now
        return answers


def _start(host: Host, job: str, action: Action) -> subprocess.Popen[bytes]:
    folders = sorted({tempfile.gettempdir(), "/tmp"})  # noqa: S108 (of another host, where this one's may be missing)
    command = ["sh", "-s", "--", job or "nobody", action, *folders]
    process = subprocess.Popen(
        command if host.is_here else [*SSH, host.name, shlex.join(command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.write(SCRIPT.encode())
            process.stdin.close()
        process.stdin = None
    return process


def _read(host: Host, process: subprocess.Popen[bytes], deadline: float) -> Answer:
    try:
        output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # and not for its pipes, which a process that it has started may keep open
        return Answer(host.name, is_well=False, problem="does not answer in time")
    head, _, records = output.partition(b"\n")
    if process.returncode != 0 or not _HEAD.fullmatch(head.rstrip()):
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return Answer(host.name, is_well=False, problem=last or f"ssh has ended with code {process.returncode}")
    ranks, verdict = _parse(records)
    return Answer(host.name, True, frozenset(map(int, head.split()[1:])), ranks, verdict)


def _parse(records: bytes) -> tuple[tuple[Heartbeat, ...], JobVerdict | None]:
    """Return what is in the files of the folders, one after another."""
    ranks: dict[int, Heartbeat] = {}
    verdict, at = None, 0
    while at < len(records):
        end = records.find(b"\n", at) + 1 or len(records)
        line = records[at:end]
        if (asked := _SIGTERM.fullmatch(line)) is not None:
            if (heartbeat := ranks.get(int(asked[1]))) is not None:
                heartbeat.signal = heartbeat.signal or signal.SIGTERM
            at = end
        elif line.startswith(b"{") and (host_verdict := parse_verdict(line)) is not None:
            verdict, at = host_verdict, end
        else:
            if (heartbeat := Heartbeat.from_bytes(records[at : at + SIZE])) is not None:
                ranks[heartbeat.rank] = heartbeat
            at += SIZE
    return tuple(ranks.values()), verdict
