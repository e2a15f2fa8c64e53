"""Runs examples/mnist.py as it is, and prints when each rank has taken its first step. For `benchmarks.startup`."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_MNIST = Path(__file__).resolve().parents[1] / "examples/mnist.py"


def print_time_of_first_step() -> None:
    """Print `startup-ready: <seconds since 1970>` after the first step of the first optimizer, and never again."""

    def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook.remove()
        # One write, so that a launcher does not put its prefix into the middle.
        print(f"startup-ready: {time.time()}\n", end="", flush=True)

    hook = register_optimizer_step_post_hook(after_step)


if __name__ == "__main__":
    print_time_of_first_step()
    runpy.run_path(str(_MNIST), run_name="__main__")
