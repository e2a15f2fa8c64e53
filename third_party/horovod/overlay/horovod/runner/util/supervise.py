"""Ends a job together with what started it: a signal, or the client of `docker exec` and the like."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil
from horovod.runner.util import output

_ENDINGS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
# What mpirun hands on to its ranks. Schedulers announce the end of a job so.
_MESSAGES = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1

# A client whose own stdin is empty closes ours as it starts.
EMPTY_STDIN_S = 3.0


class EndedError(RuntimeError):
    """The job was ended by a signal."""

    def __init__(self, signum: int) -> None:
        words = {signal.SIGINT: "interrupted", signal.SIGPIPE: "ended, as nobody reads the output any more"}
        super().__init__(words.get(signal.Signals(signum), f"ended by {signal.Signals(signum).name}"))
        self.exit_code = 128 + signum


def endings() -> list[signal.Signals]:
    """Return the signals that end the job; nohup and shells leave some ignored, and so they stay."""
    return [signum for signum in _ENDINGS if signal.getsignal(signum) != signal.SIG_IGN]


def run(command: str, env: Mapping[str, str]) -> int:
    """Run a launcher, to which the terminal and its signals belong as they do to this process; return its exit code.

    Raises:
        EndedError: a signal has ended it.
    """
    # Where the parent ignores the ends of its children, so would this process.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals = [*endings(), *_MESSAGES, signal.SIGCHLD]
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        if sys.platform == "linux":
            # Else nothing would end the launcher when this process is killed.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    exec_client = has_exec_client()
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"exec {command}"],
        env=env,
        preexec_fn=prepare,
        stdin=subprocess.PIPE if exec_client else None,
        stderr=subprocess.PIPE,
    )
    ended = threading.Event()
    reader = threading.Thread(target=output.pass_on_without_frames, args=(process.stderr, ended), daemon=True)
    reader.start()
    if exec_client:
        threading.Thread(target=end_with_client, args=(process.stdin,), daemon=True).start()
    ended_by = _hand_on(process, signals)
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    ended.set()
    reader.join()  # as long as whoever reads our stderr needs for it
    if ended_by and process.returncode:
        raise EndedError(ended_by)
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _hand_on(process: subprocess.Popen[bytes], signals: list[signal.Signals]) -> int:
    """Hand signals on to a launcher until it ends; return the first of those that are to end it, or 0."""
    ended_by = 0
    while process.poll() is None:
        info = signal.sigwaitinfo(signals)
        if info.si_signo == signal.SIGCHLD:
            continue
        is_message = info.si_signo in _MESSAGES
        # The terminal's own have reached the launcher as well. At a third one mpirun would leave its ranks alone.
        if is_message or (not ended_by and info.si_code <= 0):
            process.send_signal(info.si_signo)
        if not is_message:
            ended_by = ended_by or info.si_signo
    return ended_by


def has_exec_client() -> bool:
    """Return whether stdin is the pipe of a client outside this container, which ends when the client does."""
    try:
        here = os.fstat(0)
        if not stat.S_ISFIFO(here.st_mode):
            return False
        # What a client has started in a container has no parent there. Shells and scripts may stand between.
        first = [psutil.Process(), *psutil.Process().parents()][-1]
        return first.pid != 1 and first.ppid() == 0 and os.path.samestat(here, Path(f"/proc/{first.pid}/fd/0").stat())
    except (OSError, psutil.Error):  # a closed stdin, or processes that may not be looked at
        return False


def end_with_client(sink: IO[bytes] | None = None) -> None:
    """End this process's job when stdin ends without a word: no signal of such a client arrives here.

    What has been written to stdin may end.

    Args:
        sink: takes what is read; without one nothing is, because a shell may have its script there.
    """
    started = time.monotonic()
    silent = True
    if sink:
        with contextlib.suppress(BrokenPipeError), sink:
            while chunk := os.read(0, 65536):
                silent = False
                sink.write(chunk)
                sink.flush()
    else:
        watch = select.poll()
        watch.register(0, select.POLLIN)
        silent = not watch.poll()[0][1] & select.POLLIN
    if silent and time.monotonic() - started > EMPTY_STDIN_S:
        print(
            "horovodrun: stdin has ended, as it does when the client outside this container has gone; "
            "with < /dev/null the job goes on",
            file=sys.stderr,
        )
        os.kill(os.getpid(), signal.SIGTERM)
