"""`trainer submit`: from the options to a job that runs."""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import TrainerError
from trainer.files import write_atomically
from trainer.submit.options import Options, to_options
from trainer.submit.schedulers import Watch

_POLL_S = 1.0
_UNANSWERED = 30
"""So many questions in a row may fail, as while a scheduler is started again, before --follow gives up."""


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
    path = Path("runs", options.job.name + options.scheduler.suffix)
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror}") from None
    job_id = options.scheduler.submit(path)
    _say(f"{path} is job {job_id}; {shlex.join(options.scheduler.cancel_command(job_id))} ends it")
    return follow(options, job_id) if options.follows else 0


def follow(options: Options, job_id: str) -> int:
    """Print what a job and its successors write until they have ended; return the largest exit code.

    It is 130 after Ctrl-C.
    """
    not_followed, codes = deque([job_id]), list[int]()
    try:
        while not_followed:
            job_id = not_followed.popleft()
            codes.append(_follow_one(options, job_id))
            for successor in options.scheduler.successors(options.job, job_id):
                cancel = shlex.join(options.scheduler.cancel_command(successor))
                _say(f"job {job_id} goes on as job {successor}; {cancel} ends it")
                not_followed.append(successor)
    except KeyboardInterrupt:
        cancel = shlex.join(options.scheduler.cancel_command(job_id))
        _say(f"job {job_id} goes on; {cancel} ends it")
        return 130
    return max(codes)


def _follow_one(options: Options, job_id: str) -> int:
    follower = _Follower(options, job_id)
    while (code := follower.look()) is None:
        time.sleep(_POLL_S)
    return code


class _Follower:
    """Prints what is new in a job's state and its logs."""

    def __init__(self, options: Options, job_id: str) -> None:
        self._options, self._job_id = options, job_id
        self._watch = Watch(options.scheduler, job_id)
        self._seen: dict[str, int] = {}
        self._state = ""
        self._unanswered = 0

    def look(self) -> int | None:
        """Print what is new; return the exit code of a job that has ended."""
        try:
            state = self._watch.state()
            sys.stdout.write(self._options.scheduler.new_output(self._options.job, self._job_id, self._seen))
            sys.stdout.flush()
        except TrainerError:
            self._unanswered += 1
            if self._unanswered >= _UNANSWERED:
                raise
            return None
        self._unanswered = 0
        if state.name != self._state:
            self._state = state.name
            _say(f"job {self._job_id}: {state.name}")
        return state.code


def _say(text: str) -> None:
    print(f"trainer submit: {text}", file=sys.stderr, flush=True)
