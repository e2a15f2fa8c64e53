"""`trainer.launch`: what its caller runs."""

from __future__ import annotations

import inspect
import io
import linecache
import os
import select
import signal
import site
import sys
import sysconfig
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import __main__
from trainer.cluster.environment import launches
from trainer.errors import ConfigError
from trainer.ops.launch.keepers import Keepers
from trainer.ops.launch.outcome import conclude, dumps, read_outcomes
from trainer.ops.launch.output import Output
from trainer.ops.supervise.folder import Events
from trainer.ops.supervise.options import Options, check
from trainer.ops.supervise.signals import TICK_S, Signals
from trainer.ops.supervise.supervisor import Supervisor
from trainer.watch.job_folder import JOB

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

    This is `trainer run` for a function: this process starts the ranks with the same launchers, and watches them.
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
            rank itself, or the launcher is not installed.
        TrainerError: a host cannot be reached.
        LaunchError: the job failed, but not because of an exception in the function: a rank was killed, or the job
            hung.
        Exception: the function's own exception, from the rank that failed first. Its cause is the traceback on that
            rank, and a note names the rank and its host.
    """
    _refuse_within_rank()
    given = {"np": np, "hosts": hosts, "min_np": min_np, "max_restarts": max_restarts, "timeout_s": timeout_s}
    checked = check({**given, "launcher": launcher})
    _check_call(function, args, kwargs)
    call = _dump_call(function, args, kwargs)
    job = uuid.uuid4().hex
    keepers = Keepers(checked["hosts"], job)
    # Messages about attempts matter only if there can be several. Otherwise the results or an exception say it all.
    events = Events(None, is_silent=max_restarts == 0)
    with Output() as output, keepers.keep(call):
        options = Options(
            **checked,
            command=(sys.executable, "-m", "trainer.ops.launch.rank", str(keepers.folder)),
            environment={"PYTHONPATH": os.pathsep.join(_import_path())},
            streams=output.streams,
        )
        with _Interrupts(output) as interrupts:
            supervisor = Supervisor(options, interrupts, events, job)
            code = supervisor.run()
        if interrupts.interrupted_by is not None:
            raise KeyboardInterrupt
        outcomes = keepers.collect()
    return conclude(code, supervisor.attempts[-1].judgement.text, read_outcomes(io.BytesIO(outcomes)))


class _Interrupts(Signals):
    """Notes Ctrl-C, or the interrupt of a notebook's kernel, and prints what the job prints while it is waited for."""

    def __init__(self, output: Output) -> None:
        super().__init__(preempts=(), interrupts=(signal.SIGINT,))
        self._output = output

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted_by is not None:  # the second time it does not wait for anything
            raise KeyboardInterrupt
        super()._note(number, frame)

    def tick(self) -> None:
        select.select(self._output.descriptors, [], [], TICK_S)
        self._output.print()


def _refuse_within_rank() -> None:
    within = [f"rank {rank.rank} of {rank.size}" for rank in launches() if rank.size > 1] + ["a rank"] * (
        JOB in os.environ
    )
    if within:
        text = f"trainer.launch is called within {within[0]}, and starts ranks itself"
        raise ConfigError(f"{text}; call it outside of a launcher's job")


def _check_call(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Check that the function takes these arguments, before ranks are started that would find out.

    Raises:
        ConfigError: it does not.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # some built-in functions have no signature
        return
    except TypeError as error:
        taken = ", ".join(launch.__kwdefaults__ or ())
        raise ConfigError(f"{_name_of(function)}(): {error}; trainer.launch itself takes {taken}") from None


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _dump_call(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    try:
        call = dumps((function, args, kwargs))
    except Exception as error:  # whatever the values' own code raises
        text = f"trainer.launch cannot send {_name_of(function)}() or its arguments: {error}"
        raise ConfigError(text.partition("\n")[0]) from None
    # The ranks get a script's options too, but not those of a notebook's kernel, which mean nothing to them.
    argv = sys.argv if hasattr(__main__, "__file__") else [_name_of(function)]
    # The source of a notebook's cells, for tracebacks. Unlike entries of files, theirs have no modification time.
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return dumps((argv, sources, call))


def _import_path() -> list[str]:
    """Return the folders in which this process finds modules and a new Python would not."""
    usual = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    library = sysconfig.get_path("stdlib")
    path = [str(Path(entry).absolute()) for entry in sys.path if not entry.endswith(".zip")]
    return [entry for entry in path if entry not in usual and not entry.startswith(library)]
