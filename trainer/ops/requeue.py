"""`trainer requeue`: decide whether a job whose ranks have ended goes back into its scheduler's queue.

The job files of Slurm and Grid Engine in jobs/ call it on the job's first host, and do what its exit code says.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from trainer.cluster.exit_codes import MISTAKE, PREEMPTED
from trainer.errors import TrainerError

REPEATS = 3
"""How many starts in a row are repeated that have not saved: the next one may end like them."""
_CRASHES = (134, 135, 139)
"""What a shell around a rank makes of SIGABRT, SIGBUS and SIGSEGV."""
_EPILOG = f"""\
A start that has saved (exit code {PREEMPTED}) goes back into the queue. So does one that
has failed, up to {REPEATS} times in a row, if its ranks were told to save, if a rank
has crashed below Python, or if a host was lost. A mistake of the user's
(exit code {MISTAKE}) and any other failure do not.

exit codes: {PREEMPTED} back into the queue; any other one is the job's
"""


def add_parser(new: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `requeue` to the subcommands."""
    parser = new(
        "requeue",
        help="decide in a job file whether the job goes back into the queue",
        description="Decide whether a job whose ranks have ended goes back into the queue.",
        epilog=_EPILOG,
    )
    parser.add_argument("code", type=int, metavar="CODE", help="the exit code of what has started the ranks")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the job's logs; srun.log is what srun has said")
    parser.add_argument("--told", dest="is_told", action="store_true", help="the ranks were told to save")
    text = "a command for bash that fails if a host of the job was lost"
    parser.add_argument("--probe", metavar="COMMAND", default="true", help=text)


def requeue(parsed: argparse.Namespace) -> int:
    """Return the exit code of the command.

    Raises:
        TrainerError: the folder cannot be read or written, so that nothing would count the starts in a row.
    """
    try:
        return decide(parsed.code, parsed.folder, parsed.is_told, parsed.probe)
    except OSError as error:
        raise TrainerError(f"{error.filename or parsed.folder}: {error.strerror}") from None


def code_of_ranks(code: int, messages: str) -> int:
    """Return the exit code that counts: srun returns the largest, which may be that of a rank that it has killed.

    Args:
        messages: what srun says, with the exit codes of all ranks; empty for another launcher.
    """
    # A mistake would be repeated by another start, even where other ranks have saved.
    for telling in (MISTAKE, PREEMPTED):
        if re.search(rf"^.* exit code {telling}$", messages, re.MULTILINE):
            return telling
    return code


def has_crashed(code: int, messages: str) -> bool:
    """Return whether the rank that ended first crashed below Python, in a driver or a library.

    That seldom happens twice. Other ranks may abort because of it.
    """
    first = re.search(r"^.* tasks? [0-9,-]+: .*$", messages, re.MULTILINE)
    if first is None:
        return code in _CRASHES
    return bool(re.search(r": (Segmentation fault|Bus error|Aborted)| exit code 13[459]$", first[0]))


def decide(code: int, folder: Path, is_told: bool, probe: str) -> int:
    """Return `PREEMPTED` if the job is to be started again, else its exit code; say why.

    Args:
        code: the exit code of what has started the ranks.
        folder: the folder of the job's logs. The file `unsaved` there counts the starts in a row that have not saved.
        is_told: whether the ranks were told to save, and may have failed instead of saving.
        probe: a command that fails if a host of the job was lost. It may take a minute, so it runs only if nothing
            else explains why the ranks have failed.
    """
    errors, unsaved = folder / "srun.log", folder / "unsaved"
    messages = errors.read_text(errors="replace") if errors.exists() else ""
    code = code_of_ranks(code, messages)
    if code in (0, MISTAKE):
        return code
    repeats = 0
    if code != PREEMPTED:
        # A node that has just come back may refuse its ranks.
        may_go_better = is_told or has_crashed(code, messages) or " launch failed: " in messages
        if not may_go_better and subprocess.call(["bash", "-c", probe], stdin=subprocess.DEVNULL) == 0:
            return code
        repeats = 1 + _number_in(unsaved)
    if repeats > REPEATS:
        print(f"exit code {code}: not saved {repeats} times in a row")
        return code
    unsaved.write_text(f"{repeats}\n")
    print(f"exit code {code}: back into the queue")
    return PREEMPTED


def _number_in(file: Path) -> int:
    """Return the number in a file; 0 where there is none, as where a full disk has left the file empty."""
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return int(text) if re.match(r"[0-9]{1,9}$", text) else 0
