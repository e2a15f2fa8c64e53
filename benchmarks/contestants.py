"""Contestants: how each one is started, and how its report is read and checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import REPORT_PREFIX, Report
from benchmarks.launching import launch, on_one_core, run
from benchmarks.workloads import BATCH_SIZE, LEARNING_RATE, MOMENTUM, RESNET, TRANSFORMER, TUTORIAL, WORKLOADS, Workload
from measuring import Finished

OURS, LIMIT = "ours", "limit"
DDP, ON_DDP = "ddp", ("fabric", "accelerate")
"""The loop on PyTorch's own DDP, and libraries that wrap it."""
_ROUNDING = 1e-3
_EXAMPLE = (
    *("--network", TUTORIAL, "--batch-size", str(BATCH_SIZE)),
    *("--lr", str(LEARNING_RATE), "--momentum", str(MOMENTUM)),
)
_EPOCH_LINE = re.compile(
    r"^epoch \d+/\d+: loss (?P<loss>[\d.]+),.* accuracy (?P<accuracy>[\d.]+) %, evaluated (?P<evaluated>\d+)/\d+, "
    r"(?P<seconds>[\d.]+) s \((?P<rate>[\d,]+) samples/s\)$",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way of training the same network on the same data."""

    title: str
    script: str
    options: tuple[str, ...] = ()
    launcher: str = "horovodrun"
    same_losses: bool = True
    """Its batches, dropout and gradients are ours, so its losses must equal ours to the last bit."""
    rounded: bool = False
    """It reports by epoch lines, whose rounded rate and seconds give the samples only roughly."""


def _loops(network: str) -> dict[str, Contestant]:
    """Return the loops of loops.py, which train any network."""
    loops = {
        OURS: ("ours", "horovodrun"),
        "tuned": ("Horovod by hand, tuned", "horovodrun"),
        "horovod": ("Horovod by hand, defaults", "horovodrun"),
        DDP: ("DDP by hand", "torchrun"),
        "fabric": ("Lightning Fabric", "peers"),
        "accelerate": ("Accelerate", "peers"),
        LIMIT: ("limit", "torchrun"),
    }
    return {
        name: Contestant(
            title=title, script="benchmarks/loops.py", options=(name, "--network", network), launcher=launcher,
            same_losses=name != LIMIT,
        )
        for name, (title, launcher) in loops.items()
    }  # fmt: skip


CONTESTANTS: Mapping[str, Mapping[str, Contestant]] = {
    TUTORIAL: {
        **_loops(TUTORIAL),
        OURS: Contestant(
            title="ours",
            script="examples/mnist.py",
            options=(*_EXAMPLE, "--no-channels-last", "--warmup-epochs", "1", "--decay", "none", "--dataset", "mnist"),
        ),
        "plain": Contestant(
            title="plain Horovod example",
            script="examples/mnist_plain.py",
            options=_EXAMPLE,
            same_losses=False,
            rounded=True,
        ),
    },
    TRANSFORMER: _loops(TRANSFORMER),
    RESNET: _loops(RESNET),
}
"""By network and name. The tutorial network is trained by `Trainer` and by the plain example that it is for."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of one contestant."""

    network: str = TUTORIAL
    contestant: str
    ranks: int
    round: int
    command: list[str]
    report: Report | None
    problem: str | None
    """Why this run does not count; None when it does."""
    stderr_tail: str = ""
    """End of stderr of a run that failed."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that all runs of a benchmark share."""

    data_dir: Path
    """The user's folder, with the four files plain or as .gz."""
    plain_data_dir: Path
    """With the files decompressed, as torchvision requires; for the plain example."""
    work_dir: Path
    """Holds the runs' records."""
    epochs: int
    timeout_s: float
    two_hosts: Mapping[str, str] | None = None
    """What the environment needs for runs on the hosts of two_hosts.py; None for runs on this one."""


def start(network: str, name: str, ranks: int, round: int, settings: RunSettings) -> Run:
    """Run a contestant once and read its report. A single rank is bound to one core."""
    contestant = CONTESTANTS[network][name]
    data_dir = settings.plain_data_dir if name == "plain" else settings.data_dir
    command = launch(contestant.script, ranks, contestant.launcher, on_two_hosts=settings.two_hosts is not None)
    command += [*contestant.options, "--epochs", str(settings.epochs), "--data-dir", str(data_dir)]
    record = settings.work_dir / f"{network}-{name}-{ranks}-{round}"
    if contestant.script == "examples/mnist.py":
        command += ["--output", str(record)]
    if ranks == 1:
        command = on_one_core(command)
    finished = run(command, timeout_s=settings.timeout_s, threads=1, variables=settings.two_hosts)
    report, problem = None, finished.problem
    if problem is None:
        report = read_report(finished, record)
        problem = check(report, WORKLOADS[network], settings.epochs, ranks, rounded=contestant.rounded)
    return Run(
        network=network,
        contestant=name,
        ranks=ranks,
        round=round,
        command=command,
        report=report,
        problem=problem,
        stderr_tail=finished.stderr[-4000:] if problem else "",
    )


def read_report(finished: Finished, record: Path) -> Report | None:
    """Return a run's report, from its record, its report line or its epoch lines; None when it has none of them."""
    if (epochs := record / "epochs.jsonl").exists():
        return _from_record(epochs.read_text())
    for line in finished.stdout.splitlines():
        if line.startswith(REPORT_PREFIX):
            return Report(**json.loads(line.removeprefix(REPORT_PREFIX)))
    return _from_epoch_lines(finished.stdout)


def check(report: Report | None, workload: Workload, epochs: int, ranks: int, *, rounded: bool = False) -> str | None:
    """Return what is wrong with a report, in one line; None for a report that counts."""
    slack = workload.samples // 100 if rounded else 0
    if report is None or len(report.seconds) != epochs:
        return f"WRONG: it did not report {epochs} epochs"
    if any(abs(samples - workload.samples) > slack for samples in report.samples):
        return f"WRONG: it trained on {report.samples} samples instead of {workload.samples} in each epoch"
    if report.evaluated != workload.test_samples:
        return f"WRONG: it was tested on {report.evaluated} samples instead of {workload.test_samples}"
    if ranks > 2:  # with fewer updates, they end with a worse score
        fell = report.losses[-1] < report.losses[0]
        return None if fell else f"WRONG: the training losses are {report.losses}, and do not fall"
    if not workload.is_good(report.score):
        return f"WRONG: test score {report.score:.2f} is worse than {workload.worst_score:.2f}"
    return None


def differing_losses(runs: Sequence[Run]) -> list[str]:
    """Describe the runs of a network whose losses differ from its first run's, where they must be the same.

    The sum of two ranks' gradients does not depend on their order, so MPI and Gloo give the same bits. More ranks end
    with losses that are `_ROUNDING` apart at most.
    """
    found = []
    first: dict[tuple[str, int], Run] = {}
    for one in runs:
        if one.report and CONTESTANTS[one.network][one.contestant].same_losses:
            same = first.setdefault((one.network, one.ranks), one)
            assert same.report is not None
            losses, wanted, tolerance = one.report.losses, same.report.losses, _ROUNDING if one.ranks > 2 else 0.0
            if any(not math.isclose(*pair, rel_tol=tolerance) for pair in zip(losses, wanted, strict=True)):
                found.append(
                    f"WRONG: {one.network}: {one.contestant} and {same.contestant} on {one.ranks} ranks (round "
                    f"{one.round}): training losses {losses} and {wanted}"
                )
    return found


def _from_record(text: str) -> Report:
    epochs = [json.loads(line) for line in text.splitlines()]
    last = epochs[-1]["validation"]
    return Report(
        seconds=[epoch["seconds"] for epoch in epochs],
        losses=[epoch["train_loss"] for epoch in epochs],
        samples=[epoch["samples"] for epoch in epochs],
        score=last["metrics"]["accuracy"],
        evaluated=last["evaluated"],
    )


def _from_epoch_lines(text: str) -> Report | None:
    lines = list(_EPOCH_LINE.finditer(text))
    if not lines:
        return None
    seconds = [float(line["seconds"]) for line in lines]
    rates = [float(line["rate"].replace(",", "")) for line in lines]
    return Report(
        seconds=seconds,
        losses=[float(line["loss"]) for line in lines],
        samples=[round(rate * time_s) for rate, time_s in zip(rates, seconds, strict=True)],
        score=float(lines[-1]["accuracy"]) / 100,
        evaluated=int(lines[-1]["evaluated"]),
    )
