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


def large() -> bytes:
    return bytes(20_000_000)


def ready() -> int:
    from tests.security.job_that_waits import wait

    found = square()
    wait()
    return found


def main(name: str, launcher: str) -> None:
    """Print what the function returned on two ranks."""
    import horovod

    found: list[Any] = horovod.run(globals()[name], np=2, use_gloo=launcher == "gloo", use_mpi=launcher == "mpi")
    print("results:", [len(one) if isinstance(one, bytes) else one for one in found])


if __name__ == "__main__":
    main(*sys.argv[1:])
