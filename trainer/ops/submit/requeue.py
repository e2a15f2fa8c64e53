"""Decide whether a job whose ranks have ended goes back into the queue.

    python3 requeue.py CODE FOLDER TOLD PROBE ...

The job files of Slurm and Grid Engine hold this program and run it on the job's first host, where there may be no
trainer, as when the ranks run in an image: it needs Python 3.6 and nothing else.
"""

import re
import subprocess
import sys
from pathlib import Path

from trainer.cluster.exit_codes import MISTAKE, PREEMPTED

REPEATS = 3
"""How many starts in a row are repeated that have not saved: the next one may end like them."""
_CRASHES = (134, 135, 139)
"""What a shell around a rank makes of SIGABRT, SIGBUS and SIGSEGV."""


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


def decide(code: int, folder: Path, told: str, *probe: str) -> int:
    """Return `PREEMPTED` if the job is to be started again, else its exit code; say why.

    Args:
        code: the exit code of what has started the ranks.
        folder: the folder of the job's logs. The file `unsaved` there counts the starts in a row that have not saved.
        told: not empty if the ranks were told to save, and may have failed instead of saving.
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
        may_go_better = told or has_crashed(code, messages) or " launch failed: " in messages
        if not may_go_better and subprocess.call(probe, stdin=subprocess.DEVNULL) == 0:
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


if __name__ == "__main__":
    sys.exit(decide(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
