"""`trainer.launch`: what its caller runs."""

from __future__ import annotations

import inspect
import linecache
import math
import os
import pickle
import secrets
import selectors
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import __main__
from trainer.cluster.environment import launches
from trainer.errors import ConfigError, LaunchError, TrainerError
from trainer.ops.launch.outcome import Report, conclude, read_outcomes
from trainer.ops.launch.output import Tags
from trainer.ops.launch.sending import describe_unsendable, dump, dumps
from trainer.ops.launch.supervised import remove
from trainer.ops.supervise.hosts import Host, parse_hosts, slots_of
from trainer.ops.supervise.launchers import environment_for
from trainer.watch.job_folder import JOB

LAUNCHERS = ("horovodrun", "mpi", "gloo", "torchrun")
_ENDED_S = 60.0
"""Time for the supervisor to end the job on all hosts after an interrupt; it needs a few seconds."""
_QUIET_S = 0.5
"""How long to wait for output after the supervisor has ended, if another process keeps its pipes open."""

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    /,
    *args: Any,
    np: int = 2,
    hosts: str | None = None,
    launcher: str = "horovodrun",
    max_restarts: int = 0,
    min_np: int | None = None,
    timeout_s: float = 600.0,
    **kwargs: Any,
) -> list[Result]:
    """Call `function(*args, **kwargs)` on several ranks, and return what each of them returns, in the order of ranks.

    This is `trainer run` for a function: the same launchers start the ranks, and the same supervisor watches them.
    The output of all ranks is streamed, each line prefixed with its rank in brackets. The ranks are new processes,
    so it does not matter whether this process has used CUDA. The function, its arguments and the results are
    pickled by cloudpickle, so the function may be defined in a notebook's cell. GPU tensors arrive in CPU memory.
    All of this goes through files that only this user can read, and through ssh. When the call ends, no process and
    no file is left; that also holds after Ctrl-C, after an interrupt of a notebook's kernel, and when this process
    is killed.

    Args:
        function: every rank calls it; it calls `trainer.init`, or makes a `trainer.Trainer`.
        args: arguments for the function. It also gets all keyword arguments that are not listed here.
        np: number of ranks.
        hosts: hosts and their slots, as in "a:2,b:2"; this host when None. Python, and the modules that the function
            imports, must be at the same paths on all hosts.
        launcher: "horovodrun"; "mpi" or "gloo", which are horovodrun with that option; or "torchrun".
        max_restarts: how often the function is called again, from its beginning, after a failure. It continues where
            it was if it keeps checkpoints.
        min_np: the fewest ranks with which the function is called again when hosts are lost; `np` when None.
        timeout_s: seconds without progress of any rank after which the job has failed; 0 means no limit.

    Raises:
        ConfigError: an argument is not valid; something cannot be sent, which the error names; or this process is a
            rank itself.
        LaunchError: the job failed, but not because of an exception in the function: a rank was killed, or the job
            hung.
        Exception: the function's own exception, from the rank that failed first. Its cause is the traceback on that
            rank, and a note names the rank and its host.
    """
    _refuse_within_rank()
    places = _check(np, hosts, launcher, max_restarts, min_np, timeout_s)
    options = ["-np", str(np), "--max-restarts", str(max_restarts), "--timeout", f"{timeout_s:g}"]
    options += ["-H", hosts] if hosts else []
    options += ["--min-np", str(min_np)] if min_np is not None else []
    options += [f"--{launcher}"] if launcher != "horovodrun" else []
    # Neither file has a name, so both are gone however this process ends.
    with tempfile.TemporaryFile() as call, tempfile.TemporaryFile() as results:
        _check_call(function, args, kwargs)
        _write_call(call, function, args, kwargs)
        _supervise(options, places, call, results)
        results.seek(0)
        report: Report = pickle.load(results)  # noqa: S301 (of the process that was started here)
        if not report.was_started:
            raise (ConfigError if report.is_mistake else TrainerError)(report.text)
        return conclude(report, read_outcomes(results))


def _refuse_within_rank() -> None:
    rank = next((rank for rank in launches() if rank.size > 1), None)
    if rank is not None or JOB in os.environ:
        who = f"rank {rank.rank} of {rank.size}" if rank is not None else "a rank"
        raise ConfigError(
            f"trainer.launch is called within {who}, and starts ranks itself; call it outside of a launcher's job"
        )


def _check(
    np: int, hosts: str | None, launcher: str, max_restarts: int, min_np: int | None, timeout_s: float
) -> Sequence[Host]:
    """Return the hosts.

    Raises:
        ConfigError: a value is not valid.
    """
    if np < 1:
        raise ConfigError(f"np is {np}; valid is a number of at least 1")
    try:
        places = parse_hosts(hosts) if hosts else (Host("localhost", np),)
    except ConfigError as error:
        raise ConfigError(str(error).replace("-H has", "hosts has")) from None
    if slots_of(places) < np:
        raise ConfigError(f"np is {np}, and the hosts {hosts!r} have {slots_of(places)} slots")
    if launcher not in LAUNCHERS:
        raise ConfigError(f"launcher is {launcher!r}; valid are {', '.join(LAUNCHERS)}")
    if launcher != "torchrun" and shutil.which("horovodrun", path=environment_for("")["PATH"]) is None:
        raise ConfigError('horovodrun is not installed; launcher="torchrun" starts the ranks with PyTorch alone')
    if max_restarts < 0:
        raise ConfigError(f"max_restarts is {max_restarts}; valid is a number of at least 0")
    if min_np is not None and not 1 <= min_np <= np:
        raise ConfigError(f"min_np is {min_np}; valid is 1 to {np}, which np is")
    if not timeout_s >= 0:
        raise ConfigError(f"timeout_s is {timeout_s}; valid is a number of at least 0")
    return places


def _check_call(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Check that the function takes these arguments, before ranks are started that would find out.

    Raises:
        ConfigError: it does not.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        options = inspect.signature(launch).parameters.values()
        taken = ", ".join(option.name for option in options if option.default != option.empty)
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"{name}(): {error}; trainer.launch itself takes {taken}") from None


def _write_call(
    file: BinaryIO, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    try:
        call = dumps((function, args, kwargs))
    except Exception as error:  # whatever the values' own code raises
        parts = {f"argument {number}": value for number, value in enumerate(args, 1)}
        parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
        name = getattr(function, "__name__", type(function).__name__)
        why = describe_unsendable({**parts, f"function {name!r}": function}) or str(error)
        raise ConfigError(f"trainer.launch cannot send {why}") from None
    # The ranks get a script's options too, but not those of a notebook's kernel, which mean nothing to them.
    argv = sys.argv if hasattr(__main__, "__file__") else [getattr(function, "__name__", "function")]
    # The source of a notebook's cells, for tracebacks. Unlike entries of files, theirs have no modification time.
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    dump((argv, sources, call), file)
    file.seek(0)


def _supervise(options: Sequence[str], hosts: Sequence[Host], call: IO[bytes], results: IO[bytes]) -> None:
    """Run the job, and print what it prints.

    Raises:
        LaunchError: the supervisor itself was killed.
    """
    # The same path on all hosts: the others may lack this one's folder for temporary files.
    parent = tempfile.gettempdir() if all(host.is_here for host in hosts) else "/tmp"  # noqa: S108 (made with 0700)
    folder = Path(parent, f"trainer-launch-{secrets.token_hex(16)}")
    command = [sys.executable, "-m", "trainer.ops.launch.supervised", str(os.getpid()), str(folder)]
    command += [str(results.fileno()), *options, sys.executable, "-m", "trainer.ops.launch.rank", str(folder)]
    with subprocess.Popen(
        command,
        stdin=call,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[results.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
        # A session of its own, so that Ctrl-C reaches it only through this process, once.
        start_new_session=True,
    ) as process:
        try:
            _print_output(process)
        except BaseException:  # Ctrl-C, or the interrupt of a notebook's kernel
            # As a terminal does it: to the supervisor and to the launcher.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            _print_output(process, time.monotonic() + _ENDED_S)
            raise
        finally:
            if process.poll() is None:  # at a second interrupt
                process.kill()
            if process.wait() < 0:
                remove(folder, hosts)
    if process.returncode:
        raise LaunchError(f"the supervisor of the job has ended with code {process.returncode}")


def _import_path() -> list[str]:
    """Return the folders in which this process finds modules and a new Python would not."""
    usual = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    library = sysconfig.get_path("stdlib")
    path = [str(Path(entry).absolute()) for entry in sys.path if not entry.endswith(".zip")]
    return [entry for entry in path if entry not in usual and not entry.startswith(library)]


def _print_output(process: subprocess.Popen[bytes], deadline: float = math.inf) -> None:
    """Print what the job prints until it ends.

    It prints from this thread, because a notebook may show another thread's output below another cell.
    """
    with selectors.DefaultSelector() as selector:
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, (name, Tags()))
        while selector.get_map() and time.monotonic() < deadline:
            ready = selector.select(_QUIET_S)
            if not ready and process.poll() is not None:
                return
            for key, _ in ready:
                name, tags = key.data
                data = os.read(key.fd, 65536)
                _print(tags.text(data), name)
                if not data:
                    selector.unregister(key.fileobj)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDED_S)


def _print(text: str, name: str) -> None:
    # The stream is looked up at each call, because a test or a notebook may replace it. Its reader may be gone.
    stream = getattr(sys, name)
    if text and stream is not None:
        with suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()
