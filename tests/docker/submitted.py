"""Jobs of the files in jobs/ on a real scheduler, whose daemons run in containers."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import pytest

from tests.docker.cluster import ROOT, Cluster, Outcome, data_dir, succeed

_WAIT_S = 120.0
_UNTIL_TOLD = """\
import sys
import time
import torch
import trainer
torch.manual_seed(0)
run = trainer.init(device="cpu")
model = torch.nn.Linear(2, 2)
forward, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = run.loader(trainer.InMemory(torch.randn(64, 2), torch.zeros(64, dtype=torch.long)), batch_size=4)
saved = run.checkpoints(f"runs/{sys.argv[1]}")
for epoch in run.epochs(10**6 if saved.resumed is None else saved.epoch + 1):
    for inputs, targets in loader:
        time.sleep(0.05)
        optimizer.zero_grad()
        run.backward(torch.nn.functional.cross_entropy(forward(inputs), targets))
        optimizer.step()
run.print("done")
"""
Started = TypeVar("Started", bound="SchedulerCluster")


class SchedulerCluster(Cluster):
    """The containers of a scheduler, with a user on its controller, ctl."""

    scheduler: ClassVar[str]

    def __init__(self) -> None:
        file = ROOT / "tests/docker" / self.scheduler / "compose.yml"
        super().__init__(f"trainer-test-{self.scheduler}-{os.getpid()}", str(file))

    def exec(self, node: str) -> list[str]:
        """As the user who submits."""
        return [*self._command, "exec", "-T", "--user", "trainer", node]

    def root(self, *command: str) -> str:
        """The output of a command of the administrator's on the controller."""
        return self.compose("exec", "-T", "ctl", *command)

    @abstractmethod
    def end_jobs(self) -> None:
        """End all jobs; return when the scheduler has none any more."""

    @abstractmethod
    def submit(self, name: str, options: tuple[str, ...], command: tuple[str, ...]) -> str:
        """The id of a new job with four ranks on two hosts."""

    @abstractmethod
    def exit_code(self, job: str) -> int | None:
        """What a job, and those that go on for it, has ended with; None before."""

    @abstractmethod
    def log(self, name: str) -> str:
        """What the ranks and the script of a job have written."""

    @abstractmethod
    def describe(self, job: str) -> str:
        """What the scheduler knows of a job."""


@contextmanager
def started(kind: type[Started], image: str) -> Iterator[Started]:
    """Build the scheduler's image on ours, and start its containers."""
    folder, tag = ROOT / "tests/docker" / kind.scheduler, f"trainer-{kind.scheduler}:test"
    succeed(["docker", "build", "--build-arg", f"IMAGE={image}", "-t", tag, str(folder)], timeout_s=900)
    cluster = kind()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def end_jobs(cluster: SchedulerCluster) -> None:
    """End all jobs, and see that they leave no process on a node."""
    cluster.end_jobs()
    left = "".join(cluster.left_over(node) for node in ("n1", "n2"))
    assert not left, f"the test left processes:\n{left}"


class Submitted:
    """A job that runs beside the test."""

    def __init__(self, cluster: SchedulerCluster, name: str, *options: str, command: tuple[str, ...]) -> None:
        self.cluster, self.name = cluster, name
        self.job = cluster.submit(name, options, command)

    def wait_until_it_trains(self, text: str = "epoch 1") -> None:
        wait_for(f"{text!r} in the log", lambda: text in self.cluster.log(self.name), self.describe)

    def end(self, timeout_s: float = 500.0) -> Outcome:
        deadline = time.monotonic() + timeout_s
        while (code := self.cluster.exit_code(self.job)) is None:
            assert time.monotonic() < deadline, f"the job has not ended\n{self.describe()}"
            time.sleep(0.5)
        return Outcome(code, self.cluster.log(self.name))

    def describe(self) -> str:
        return self.cluster.describe(self.job) + self.cluster.log(self.name)[-3000:]


def wait_for(what: str, found: Callable[[], object], describe: Callable[[], str] = str) -> str:
    deadline = time.monotonic() + _WAIT_S
    while not (value := found()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} does not come\n{describe()}")
        time.sleep(0.5)
    return str(value)


def training(name: str, epochs: int) -> tuple[str, ...]:
    """A training that lasts as long as these epochs of MNIST, or so; that of MNIST is checked at its end."""
    mnist = ("--dataset", "mnist", "--target-accuracy", "98.5", "--epochs", str(epochs))
    digits = ("--dataset", "digits", "--epochs", str(20 * epochs), "--lr", "0.01")
    data = mnist if data_dir() else digits
    return ("python", "examples/mnist.py", "--checkpoint", f"runs/{name}", "--output", "none", *data)


def until_told(cluster: SchedulerCluster, name: str) -> tuple[str, ...]:
    """A training that goes on until it is told to save, however fast the machine is; its next start ends it."""
    cluster.shell("ctl", f"cat > runs/until_told.py <<'END'\n{_UNTIL_TOLD}END\n")
    return ("python", "runs/until_told.py", name)
