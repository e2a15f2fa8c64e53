"""A training in which one rank makes a fault that keeps the others waiting; `benchmarks/hangs.py` starts it."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import trainer
from examples.strategies import full_name

LONG_S = 600
SLEEPS_S = {"sleeps": LONG_S, "late": 36}
STEPS = 60


def tell() -> None:
    """Say that the fault is made now."""
    print("fault is made", file=sys.stderr, flush=True)


class Slow(torch.utils.data.Dataset[Any]):
    """A dataset one of whose samples does not come on the faulty rank."""

    def __init__(self, is_faulty: bool, at: int) -> None:
        self._is_faulty, self._at, self._drawn = is_faulty, at, 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._drawn += 1
        if self._is_faulty and self._drawn > 4 * self._at:
            tell()
            time.sleep(LONG_S)
        return torch.randn(4), torch.tensor(index % 2)


def step_in_backward() -> torch.Tensor:
    """Return a loss whose backward pass does not return."""

    class Stuck(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            tell()
            time.sleep(LONG_S)
            return gradient

    return Stuck.apply(torch.ones((), requires_grad=True))  # type: ignore[no-any-return]


def value_of(run: trainer.Run, length: int = 10) -> None:
    run.strategy.all_reduce(torch.ones(length, device=run.device))


def value_as_over_nccl(run: trainer.Run, length: int = 10) -> None:
    """All-reduce as over NCCL: the call returns at once, and something in C waits for it without Python's lock."""
    work = dist.all_reduce(torch.ones(length), async_op=True)
    assert work is not None
    usleep = ctypes.CDLL(None).usleep
    while not work.is_completed():
        usleep(10_000)
    work.wait()


def collective_alone() -> None:
    """Call a collective of the library that the strategy is over, without it."""
    if dist.is_initialized():
        dist.barrier()
    else:
        import horovod.torch as hvd

        hvd.allreduce(torch.ones(3), name="alone")


FAULTS = (
    "none",
    "late",
    "collective-alone",
    "sleeps",
    "spins",
    "stopped",
    "skips",
    "one-too-many",
    "shape",
    "cut-off",
    "loader",
    "backward",
    "exits",
)


def make_fault(fault: str, run: trainer.Run, value: Callable[..., None]) -> None:
    """Do what the faulty rank does in place of one step's all-reduce, or beside it."""
    if fault not in ("backward", "loader"):
        tell()
    if fault in SLEEPS_S:
        time.sleep(SLEEPS_S[fault])
    elif fault == "spins":
        sum(range(10**12))  # one call of C, which keeps the interpreter's lock
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "one-too-many":
        value(run)
    elif fault == "cut-off":
        subprocess.run(os.environ["CUT_OFF"], shell=True, check=True)  # noqa: S602 (the trial's own)
    elif fault == "exits":
        sys.exit(0)
    elif fault == "collective-alone":
        collective_alone()
    if fault != "skips":
        value(run, 11 if fault == "shape" else 10)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=1, help="that makes the fault")
    parser.add_argument("--step", type=int, default=10, help="in which it does")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--hang-timeout", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--as-over-nccl", action="store_true", help="these return before they are done")
    return parser.parse_args()


def main() -> None:
    args = parse()
    run = trainer.init(full_name(args.strategy), device=args.device, hang_timeout_s=args.hang_timeout)
    is_faulty = run.rank == args.rank
    value = value_as_over_nccl if args.as_over_nccl else value_of
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    forward, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = run.loader(Slow(is_faulty and args.fault == "loader", args.step), batch_size=4)
    for step, (inputs, targets) in enumerate(loader):
        if step == STEPS:
            break
        is_now = is_faulty and step == args.step
        loss = F.cross_entropy(forward(inputs), targets)
        run.backward(loss + 0 * step_in_backward() if is_now and args.fault == "backward" else loss)
        if is_now:
            make_fault(args.fault, run, value)
        else:
            value(run)
        optimizer.step()
        loss.item()  # where a rank waits for its GPU, as in most loops
        optimizer.zero_grad()
        time.sleep(0.01)
    run.print("trained")
    run.close()


if __name__ == "__main__":
    main()
