"""A program that calls `horovod.run` with a function on two ranks: `python -m tests.security.functions`."""

from __future__ import annotations

from typing import Any


def square() -> int:
    import horovod.torch as hvd

    hvd.init()
    return int(hvd.rank()) ** 2


if __name__ == "__main__":
    import horovod

    run: Any = horovod.run  # which in this project's own build refuses to run anything
    print("results:", run(square, np=2, use_gloo=True))
