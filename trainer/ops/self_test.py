"""`trainer test`: ranks on these hosts sum, train 20 steps and compare their weights, within seconds."""

from __future__ import annotations

import argparse
import time

from trainer.cluster.launchers import STARTS
from trainer.errors import TrainerError

_STEPS = 20
_EPILOG = """\
examples:
  trainer test
  trainer test -np 4 -H a:2,b:2
  trainer test --launcher torchrun

exit codes: 0 all right, 1 something is wrong, 2 these options are not valid. `trainer doctor` looks for the cause.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `test` to the subcommands."""
    parser = subparsers.add_parser(
        "test",
        help="sum over ranks and train 20 steps; says whether all is right",
        description="Start ranks, check the sum of known numbers over them, train 20 steps, and compare their weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-np", dest="ranks", type=int, default=2, metavar="N", help="number of ranks (%(default)s)")
    parser.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,…", help="hosts and their slots (localhost:N)")
    text = f"what starts them: {', '.join(STARTS)} (%(default)s)"
    parser.add_argument("--launcher", metavar="NAME", default="horovodrun", help=text)
    limit = "seconds without any progress after which it has failed (%(default).0f)"
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=60.0, metavar="S", help=limit)


def self_test(parsed: argparse.Namespace) -> int:
    """Run the test and print one line; return the exit code.

    Raises:
        ConfigError: a value is not valid.
        TrainerError: something is wrong, which it says.
    """
    from trainer.ops.launch.launch import launch  # not at the start of every other command

    began = time.monotonic()
    ranks, hosts = parsed.ranks, parsed.hosts
    results = launch(_check, np=ranks, hosts=hosts, launcher=parsed.launcher, timeout_s=parsed.timeout_s)
    transport, first_loss, last_loss = results[0]
    print(
        f"trainer test: all right: {ranks} ranks on {hosts or 'localhost'}, {transport}: the sum is exact, "
        f"{_STEPS} steps took the loss from {first_loss:.3f} to {last_loss:.3f}, and the weights are the same on all "
        f"ranks; {time.monotonic() - began:.1f} s"
    )
    return 0


def _check() -> tuple[str, float, float]:
    """Run on each rank; return what sums, as in "Horovod over MPI", and the first and the last loss.

    Raises:
        TrainerError: a sum is wrong, the loss does not fall, or weights differ.
    """
    import torch

    from trainer.run import init

    run = init()
    rank, size = run.world.rank, run.world.size
    # Powers of two, so that a rank left out or counted twice changes the sum whatever the others do.
    total = run.all_reduce(torch.tensor([2.0**rank], dtype=torch.float64), "sum").item()
    if total != 2.0**size - 1:
        raise TrainerError(f"the sum of 2^rank over {size} ranks is {total:g} on rank {rank}, not {2.0**size - 1:g}")
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 1)
    linear = torch.nn.Linear(8, 1)
    model, optimizer = run.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    loader = run.loader(list(zip(inputs, targets, strict=True)), batch_size=8)
    losses: list[float] = []
    while len(losses) < _STEPS:
        for batch, expected in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), expected)
            run.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    weights = run.all_gather(next(model.parameters()).detach().flatten())
    first, last = (run.all_reduce(losses[step]).item() for step in (0, _STEPS - 1))
    if not last < first / 2:
        raise TrainerError(f"{_STEPS} steps took the loss from {first:.3f} to {last:.3f}; it should be below half")
    if any(not torch.equal(other, weights[0]) for other in weights):
        raise TrainerError(f"the weights differ between ranks after {_STEPS} steps")
    return run.strategy.description.partition(", rank")[0], first, last
