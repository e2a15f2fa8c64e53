"""Compares what is sent in place of gradients, between two hosts whose link is made slow.

    python -m benchmarks.slow_link --rate 100mbit          # as root, with ip and tc; a few minutes

Two network namespaces are the hosts, with two ranks each and tc's token bucket on both ends of their link. Every
setting trains the 25 MB network of examples/mnist.py under ddp on the same random batches, in turns. The table has the
median seconds of an update, samples/s over all ranks, and both against ddp as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F

import trainer
from benchmarks.two_hosts import ADDRESSES, end_of, hosts, on_host
from examples.mnist import LargeNetwork
from trainer.errors import TrainerError
from trainer.launch.failure import report_failures
from trainer.launch.processes import INTERRUPTS, interrupt_on

ROOT = Path(__file__).resolve().parent.parent
BATCH, WARM_UP = 100, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"compression": "fp16"},
    "powersgd:4": {"compression": "powersgd:4"},
    "powersgd:1": {"compression": "powersgd:1"},
    "sync_every=8": {"sync_every": 8},
}


def main() -> int:
    report_failures()
    interrupt_on(*INTERRUPTS)
    options = _parse_args()
    if options.rank_of is not None:
        train(SETTINGS[options.rank_of], options.updates)
        return 0
    seconds: dict[str, list[float]] = {name: [] for name in options.settings}
    with slow_hosts(options.rate):
        for number in range(options.repeats):
            for name in options.settings:
                seconds[name].append(time_update(name, options.updates))
                print(f"{name}, round {number + 1}: {seconds[name][-1]:.3f} s an update", file=sys.stderr, flush=True)
    print(f"\n| {options.rate} | s an update | samples/s | × |\n|---|---|---|---|")
    base = statistics.median(seconds[options.settings[0]])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.3f} | {4 * BATCH / median:,.0f} | {base / median:.2g} |")
    return 0


def time_update(name: str, updates: int) -> float:
    """Train on both hosts; return rank 0's mean seconds of an update."""
    command = ["-m", "benchmarks.slow_link", "--rank-of", name, "--updates", str(updates)]
    started = [
        subprocess.Popen(
            on_host(host, [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
                           "--node-rank", str(number), "--master-addr", next(iter(ADDRESSES.values())),
                           "--master-port", "29561", *command]),
            cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number, host in enumerate(ADDRESSES)
    ]  # fmt: skip
    outputs = [one.communicate()[0] for one in started]
    lines = [line for line in outputs[0].splitlines() if line.startswith("{")]
    if any(one.returncode for one in started) or not lines:
        raise TrainerError(f"the training under {name} has failed; its lines are above")
    return float(json.loads(lines[-1])["seconds"])


def train(settings: dict[str, Any], updates: int) -> None:
    """Train on random batches as a rank of the job; print the mean seconds of an update on rank 0."""
    run = trainer.init("ddp", full_updates=0, **settings)
    torch.manual_seed(0)
    network = LargeNetwork()
    model, optimizer = run.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9))
    count = (WARM_UP + updates) * BATCH * run.world_size
    data = trainer.InMemory(torch.rand(count, 1, 28, 28), torch.randint(10, (count,)))
    started = time.perf_counter()
    for number, (inputs, targets) in enumerate(run.loader(data, BATCH)):
        if number == WARM_UP:
            run.average_weights()
            run.barrier()
            started = time.perf_counter()
        optimizer.zero_grad()
        run.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
    run.barrier()
    run.print(json.dumps({"seconds": (time.perf_counter() - started) / updates}))
    run.close()


@contextmanager
def slow_hosts(rate: str) -> Iterator[None]:
    """Context with two hosts whose link carries `rate` in each direction.

    Raises:
        TrainerError: they cannot be made, or there is no such rate.
    """
    try:
        with TemporaryDirectory() as folder, hosts(Path(folder)):
            for host in ADDRESSES:
                # Up to 20 ms of data may wait, as in a switch with a large buffer; more is dropped.
                rule = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms"]
                subprocess.run([*on_host(host, ["tc", "qdisc", "add", "dev", end_of(host), *rule])], check=True)
            yield
    except (OSError, subprocess.CalledProcessError) as error:
        raise TrainerError(f"{error}; this needs root, ip and tc, and a rate as tc takes it") from None


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rate", default="100mbit", help="in tc's notation (default: %(default)s)")
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="the first is compared with"
    )
    parser.add_argument("--updates", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
