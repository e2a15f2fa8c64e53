"""What is done on every host of a job: find its processes, signal or kill them, and read its folder.

A shell script does it, on this host and through ssh on the others, so that a host needs no Python for it. A host that
does not answer in time is not well: the same call is the probe.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from trainer.ops.supervise.hosts import Host
from trainer.ops.verdict import VERDICT, JobVerdict, parse_verdict
from trainer.watch.heartbeat import SIZE, Heartbeat
from trainer.watch.job_folder import JOB, SIGTERM

Action = Literal["make", "look", "preempt", "kill"]
_HEAD = re.compile(rb"trainer-host(?: [0-9]{1,7})*")
TIMEOUT_S = 10.0
"""Seconds in which a host has to answer."""
# /proc shows the environment that a process was started with, so the mark stays. A process may be made while others
# are killed, so killing is repeated. A heartbeat's process is preempted only if it carries the mark, because its number
# may belong to another process by now. A record that is being made is empty. It stands behind + if its rank has got
# SIGTERM.
SCRIPT = f"""
job=$1 action=$2
shift 2
name=trainer-$(id -u)-$job-$(uname -n)-$(cat /proc/sys/kernel/random/boot_id)-$(readlink /proc/self/ns/pid)
is_ours() {{ [ -O "$1" ] && [ ! -L "$1" ]; }}
if [ "$action" = make ]; then
    for folder in "$@"; do
        to=$folder/$name
        is_ours "$to" || why=$(mkdir -m700 "$to" 2>&1 && {{ head -c4096 /dev/zero 2>&1 >"$to/room" || ! rm -r "$to"; }})
        is_ours "$to" && echo trainer-host && echo "$full" && exit
        full="${{full:+$full; }}$folder: ${{why##*: }}"
        [ ! -e "$to" ] || break
    done
    echo "the job's folder cannot be made: $full" >&2
    exit 1
fi
marked() {{
    for file in $(grep -lsF "{JOB}=$job" /proc/[0-9]*/environ); do
        file=${{file#/proc/}}
        echo "${{file%/environ}}"
    done
}}
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
    folder=$folder/$name
    is_ours "$folder" && cd "$folder" || continue
    cat {VERDICT} 2> /dev/null || echo
    for file in rank-*; do
        [ -s "$file" ] || continue
        if [ "$action" = preempt ]; then
            read -r mark process rest < "$file"
            grep -qsF "{JOB}=$job" "/proc/$process/environ" && kill -USR2 "$process"
        fi
        [ -s "{SIGTERM}-${{file#rank-}}" ] && printf + || printf .
        cat "$file"
    done
    [ "$action" != kill ] || rm -rf "$folder"
    break
done
"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a host has answered."""

    host: str
    problem: str = ""
    """Why the host is not well; empty where it is."""
    processes: frozenset[int] = frozenset()
    """Processes of the job that were running."""
    ranks: tuple[Heartbeat, ...] = ()
    verdict: JobVerdict | None = None
    """What the host's watcher has found out."""
    full: str = ""
    """Folders for temporary files in which the job's could not be made, and why."""


def on_all_hosts(hosts: Sequence[Host], job: str, action: Action, timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """Look for the processes of a job on all hosts at once, signal or kill them; return the answers in their order.

    "make" makes the job's folder, "kill" also removes it.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(lambda host: _call(host, job, action, timeout_s), hosts))


def _call(host: Host, job: str, action: Action, timeout_s: float) -> Answer:
    # The last is of another host, where this one's may be missing.
    folders = dict.fromkeys([os.environ.get("TMPDIR") or tempfile.gettempdir(), tempfile.gettempdir(), "/tmp"])  # noqa: S108
    command = host.command(["sh", "-s", "--", job, action, *folders])
    try:
        # Its end is waited for, not that of its pipes, which a process that it has started may keep open.
        done = subprocess.run(
            command, input=SCRIPT.encode(), capture_output=True, timeout=timeout_s, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(host=host.name, problem="does not answer in time")
    except OSError as error:  # there is no ssh
        return Answer(host=host.name, problem=str(error))
    return parse_answer(host.name, done.stdout, done.stderr, done.returncode)


def parse_answer(host: str, output: bytes, errors: bytes = b"", code: int = 0) -> Answer:
    """Return what the script has printed: a line with processes, one with the verdict, and the ranks' records."""
    head, _, rest = output.partition(b"\n")
    if code != 0 or not _HEAD.fullmatch(head.rstrip()):
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return Answer(host=host, problem=last or f"ssh has ended with code {code}")
    verdict, _, records = rest.partition(b"\n")
    ranks = []
    for at in range(0, len(records), SIZE + 1):
        if (heartbeat := Heartbeat.from_bytes(records[at + 1 : at + 1 + SIZE])) is not None:
            if records[at : at + 1] == b"+":
                heartbeat.signal = heartbeat.signal or signal.SIGTERM
            ranks.append(heartbeat)
    processes, told = frozenset(map(int, head.split()[1:])), parse_verdict(verdict)
    full = "" if told else verdict.decode(errors="replace")
    return Answer(host=host, processes=processes, ranks=tuple(ranks), verdict=told, full=full)
