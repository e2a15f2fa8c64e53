"""What `horovod.run` is called with, as a program: `python -m tests.security.functions NAME gloo|mpi`."""

from __future__ import annotations

import sys
import time
from typing import Any


def square() -> int:
    import horovod.torch as hvd

    hvd.init()
    return int(hvd.rank()) ** 2


def pause() -> None:
    """Take some time without Horovod's libraries, which a copy of its Python files does not find."""
    time.sleep(3)


def main(name: str, launcher: str) -> None:
    """Print what the function returned on two ranks."""
    import horovod

    run: Any = horovod.run  # which in this project's own build refuses to run anything
    results = run(globals()[name], np=2, use_gloo=launcher == "gloo", use_mpi=launcher == "mpi")
    print("results:", results)


if __name__ == "__main__":
    main(*sys.argv[1:])
