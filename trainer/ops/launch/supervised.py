"""The process that `trainer.launch` starts: `trainer run` for a function. It outlives its caller, to clean up.

python -m trainer.ops.launch.supervised CALLER FOLDER RESULTS ARGUMENTS-OF-TRAINER-RUN …

The function comes from standard input. While the job runs, the function and the outcomes are in FOLDER on every host;
in the end the outcomes are written to the descriptor RESULTS. The kernel tells this process when the caller ends, for
whatever reason, so no process and no file is left.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO

from trainer.errors import ConfigError, TrainerError
from trainer.ops.launch.outcome import CALL, Report, file_of, open_private
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.ops.supervise.folder import read_former
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.options import Options, add_parser, make_parser, to_options
from trainer.ops.supervise.remote import SSH, on_all_hosts
from trainer.ops.supervise.supervisor import supervise

_PR_SET_PDEATHSIG = 1
_REMOVED_S = 10.0
"""Time for the other hosts to remove what was sent to them."""
# If the host is this one under another name, the folder is there already.
_RECEIVE = """\
umask 077
mkdir "$1" 2> /dev/null
[ -O "$1" ] && [ ! -L "$1" ] && cat > "$1/$2.part" && mv "$1/$2.part" "$1/$2"
"""
_RETURN = 'cat "$1"/outcome-* 2> /dev/null || true'
_REMOVE = 'rm -rf "$1"'


def main() -> int:
    """Run the job to its end; return 0 if the results say how it ended."""
    caller, folder, results = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    _end_with(caller)
    parser = make_parser("trainer")
    add_parser(parser.add_subparsers())
    options = to_options(parser.parse_args(["run", *sys.argv[4:]]))
    try:
        report = _run(options, folder)
        with os.fdopen(results, "wb") as output:
            pickle.dump(report, output)
            _collect(options.hosts, folder, output)
    except KeyboardInterrupt:
        return 130
    finally:
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)
        remove(folder, options.hosts)
    return 0


def remove(folder: Path, hosts: Sequence[Host]) -> None:
    """End the processes that are left of a launch on its hosts, and remove its folder there."""
    if (former := read_former(_job_folder(folder))) is not None:
        on_all_hosts(former.hosts, former.job, "kill")
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # there is no ssh, and so nothing on other hosts
        others = [_start(host, _REMOVE, subprocess.DEVNULL, subprocess.DEVNULL, folder) for host in _others(hosts)]
        for process in others:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_REMOVED_S)
            process.kill()


def _end_with(caller: int) -> None:
    """Make sure that this process, and with it the job, ends as soon as the caller ends."""
    # Even if nohup or a background shell has them ignored: SIGHUP comes from the kernel, SIGINT from the caller.
    interrupt_on(*INTERRUPTS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != caller:
        sys.exit(130)


def _job_folder(folder: Path) -> Path:
    return folder / "run"


def _run(options: Options, folder: Path) -> Report:
    try:
        folder.mkdir(mode=0o700)
        with open_private(folder / CALL) as call:
            shutil.copyfileobj(sys.stdin.buffer, call)
        # Standard input has been read, so the ranks get an empty one.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        _send(options.hosts, folder)
        # Messages about attempts matter only if there can be several. Otherwise the results or an exception say it all.
        with redirect_stderr(io.StringIO()) if options.max_restarts == 0 else nullcontext():
            # An absolute name is the whole path of the job's folder, where `trainer run` has it in runs/.
            code = supervise(replace(options, name=str(_job_folder(folder))))
    except TrainerError as error:
        return Report(1, str(error), was_started=False, is_mistake=isinstance(error, ConfigError))
    except OSError as error:  # a full disk, or no ssh
        return Report(1, f"the job cannot be started: {error}", was_started=False)
    return Report(code, _last_text(_job_folder(folder) / "events.jsonl"))


def _last_text(events: Path) -> str:
    """Return how the last attempt ended, and the last hint of where to read more."""
    entries = [json.loads(line) for line in events.read_text().splitlines()]
    ends = [str(entry["text"]) for entry in entries if "attempt" in entry and entry["event"] != "start"]
    hints = [str(entry["text"]) for entry in entries if entry["event"] == "hint"]
    return "; ".join([*(ends or [str(entries[-1]["text"])])[-1:], *hints[-1:]]).removeprefix("attempt 1: ")


def _others(hosts: Sequence[Host]) -> list[Host]:
    return [host for host in hosts if not host.is_here]


def _start(
    host: Host, script: str, source: IO[bytes] | int, sink: IO[bytes] | int, *arguments: Path | str
) -> subprocess.Popen[bytes]:
    command = shlex.join(["sh", "-c", script, "sh", *map(str, arguments)])
    # A host that loses power meanwhile is given up after three times that many seconds.
    options = ("-o", "ServerAliveInterval=10")
    return subprocess.Popen([*SSH, *options, host.name, command], stdin=source, stdout=sink, stderr=subprocess.PIPE)


def _send(hosts: Sequence[Host], folder: Path) -> None:
    """Copy the function to the other hosts.

    Raises:
        TrainerError: a host cannot be reached, or cannot take it.
    """
    started = []
    for host in _others(hosts):
        with (folder / CALL).open("rb") as call:
            started.append((host, _start(host, _RECEIVE, call, subprocess.DEVNULL, folder, CALL)))
    for host, process in started:
        problem = process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode != 0:
            why = problem or f"ssh has ended with code {process.returncode}"
            raise TrainerError(f"the function cannot be sent to host {host.name}: {why}")


def _collect(hosts: Sequence[Host], folder: Path, output: BinaryIO) -> None:
    """Write the outcomes of all ranks one after another; those of a host that does not answer are missing."""
    for file in folder.glob(file_of(folder, 0).name.replace("0", "*")):
        output.write(file.read_bytes())
    for host in _others(hosts):
        with (folder / "returned").open("w+b") as returned:
            process = _start(host, _RETURN, subprocess.DEVNULL, returned, folder)
            process.communicate()
            returned.seek(0)
            if process.returncode == 0:
                shutil.copyfileobj(returned, output)


if __name__ == "__main__":
    sys.exit(main())
