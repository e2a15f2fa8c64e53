"""`trainer submit`: write the job file, submit it, and follow the job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from trainer.errors import ConfigError, TrainerError
from trainer.files import write_atomically
from trainer.ops.command import target_of
from trainer.ops.submit.options import Options, to_options
from trainer.ops.submit.schedulers import State

_POLL_S = 1.0
# What a rank or a watcher says of a failure. Launchers, and ranks that fail because of it, write much more after it.
_WHY = re.compile(r"trainer: (?:rank \d+ on host (?!.*lost another rank)|why it failed: |hang: ).*")
_WHY_LINES = 8
_UNANSWERED = 30
"""How many questions in a row may fail, as while a scheduler is restarted, before --follow gives up."""


def run(arguments: Sequence[str]) -> int:
    """Print the job file, or submit it and follow the job if asked to; return the exit code.

    Raises:
        ConfigError: an option is not valid, or the scheduler's command is not installed here.
        TrainerError: the scheduler refuses the job, or the file cannot be written.
    """
    options = to_options(arguments)
    if options is None:
        return 0
    text = options.scheduler.render(options.job)
    if options.is_dry_run:
        print(text, end="")
        return 0
    _check_script(options)
    path = Path("runs", options.job.name + options.scheduler.suffix)
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror}") from None
    if not options.scheduler.submit_command:
        _say(f"{path} is written, not submitted, because nobody has run one: its head says what to check, and how to")
        return 0
    job_id = options.scheduler.submit(path)
    _say(f"{path} is job {job_id}; {options.scheduler.cancel_line(job_id)} ends it")
    _say(f"its output: {options.scheduler.logs(options.job, job_id)}")
    return follow(options, job_id) if options.follows else 0


def _check_script(options: Options) -> None:
    """Raise `ConfigError` if a command's script or program names no file in the folder that the nodes see."""
    target = target_of(options.job.command)
    if not options.scheduler.runs_here(options.job):
        return
    # The PATH of the nodes may have a program without a slash.
    program = target.program if "/" in target.program or target.program.endswith(".py") else ""
    path = Path(target.script or program)
    # An absolute path may be in an image, or on the nodes only.
    if path.name and not path.is_absolute() and not path.is_file():
        raise ConfigError(f"{path} is not a file in {Path.cwd()}, the folder in which the job will run")
    if program and path.is_file() and not os.access(path, os.X_OK):
        raise ConfigError(f"{path} may not be executed; call chmod +x {shlex.quote(str(path))}, or begin with python")
    is_plain = target.program == options.job.command[0] and not options.job.image  # else PYTHONPATH may be another
    if is_plain and target.module and not _has_module(target.program, target.module.partition(".")[0]):
        raise ConfigError(f"there is no module {target.module}, neither in this environment nor in {Path.cwd()}")


def _has_module(python: str, module: str) -> bool:
    """Return whether a Python finds a module; True for another Python than that of this program."""
    program = shutil.which(python)
    if program is None or Path(program).parent != Path(sys.executable).parent:
        return True
    return bool(find_spec(module) or PathFinder.find_spec(module, [str(Path.cwd())]))


def follow(options: Options, job_id: str) -> int:
    """Print what a job and its successors write until they have ended; return the largest exit code.

    It is 130 after Ctrl-C.
    """
    scheduler, job_ids, codes = options.scheduler, [job_id], list[int]()
    try:
        for job_id in job_ids:  # which get more
            codes.append(_follow_job(options, job_id))
            for successor in scheduler.successors(options.job, job_id):
                _say(f"job {job_id} goes on as job {successor}; {scheduler.cancel_line(successor)} ends it")
                job_ids.append(successor)
    except KeyboardInterrupt:
        _say(f"job {job_id} goes on; {scheduler.cancel_line(job_id)} ends it")
        return 130
    return max(codes)


def _follow_job(options: Options, job_id: str) -> int:
    """Print what is new in a job's state and its logs until it has ended; return its exit code."""
    scheduler, job = options.scheduler, options.job
    states: dict[str, State] = {}
    read: dict[str, int] = {}
    reasons: list[str] = []
    told, unanswered = "", 0
    while True:
        try:
            state = scheduler.state(job_id, states)
            output = scheduler.new_output(job, job_id, read)
        except TrainerError:
            unanswered += 1
            if unanswered >= _UNANSWERED:
                raise
            time.sleep(_POLL_S)
            continue
        unanswered = 0
        sys.stdout.write(output)
        sys.stdout.flush()
        reasons.extend(_WHY.findall(output))
        if str(state) != told:
            told = str(state)
            if state.waits:
                reasons.clear()  # what there is belongs to an earlier start
            has_failed = bool(state.code)
            for line in list(dict.fromkeys(reasons))[:_WHY_LINES] if has_failed else ():
                _say(f"job {job_id} said: {line}")
            _say(f"job {job_id}: {state}" + (f"; its output: {scheduler.logs(job, job_id)}" if has_failed else ""))
        if state.code is not None:
            return state.code
        time.sleep(_POLL_S)


def _say(text: str) -> None:
    print(f"trainer submit: {text}", file=sys.stderr, flush=True)
