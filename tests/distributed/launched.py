"""Calls of `trainer.launch` by a process of its own, which tests interrupt and kill.

python tests/distributed/launched.py LAUNCHER FOLDER
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import trainer


def wait_for_ever(folder: str) -> None:
    """Say that this rank is there, and sleep."""
    import os
    import time
    from pathlib import Path

    Path(folder, f"started-{os.getpid()}").touch()
    print("a line", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where the tests run in the background
    try:
        trainer.launch(wait_for_ever, str(Path(sys.argv[2])), np=2, launcher=sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted, and ended in good order")
        sys.exit(130)
