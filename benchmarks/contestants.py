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
from trainer.ops.processes import Finished

OURS, LIMIT = "ours", "limit"
DDP, ON_DDP = "ddp", ("fabric", "accelerate")
"""The loop on PyTorch's own DDP, and libraries that wrap it."""
_ROUNDING = 1e-3
PEERS = ("tuned", "horovod", DDP, *ON_DDP, "plain")

_RECIPE = ("--network", TUTORIAL, "--batch-size", str(BATCH_SIZE), "--lr", str(LEARNING_RATE))
_EXAMPLE = (*_RECIPE, "--momentum", str(MOMENTUM))
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
    record: bool = False
    """It reports by a run's record, as `--output` of `examples/mnist.py`."""
    rounded: bool = False
    """It reports by epoch lines, whose rounded rate and seconds give the samples only roughly."""


def _loops(network: str) -> dict[str, Contestant]:
    """Return the loops that train any network: benchmarks/*_loop.py."""
    options = ("--network", network)
    horovod, torchrun, peers = "horovodrun", "torchrun", "peers"
    of = {
        "tuned": ("hand-written Horovod loop, tuned settings", "horovod_loop", horovod),
        "horovod": ("hand-written Horovod loop, default settings", "horovod_loop", horovod),
        DDP: ("hand-written DDP loop, Gloo", "ddp_loop", torchrun),
        "fabric": ("Lightning Fabric, ddp", "fabric_loop", peers),
        "accelerate": ("Accelerate", "accelerate_loop", peers),
        LIMIT: ("limit: compute without exchange", "compute_loop", torchrun),
    }
    return {
        name: Contestant(
            title=title,
            script=f"benchmarks/{script}.py",
            options=(*options, "--tuned") if name == "tuned" else options,
            launcher=launcher,
            same_losses=name != LIMIT,
        )
        for name, (title, script, launcher) in of.items()
    }


def _with_handle(network: str) -> dict[str, Contestant]:
    """Return those of a network that no example trains: ours is a loop on the handle."""
    ours = Contestant(
        title="loop on the trainer's handle (ours)", script="benchmarks/handle_loop.py", options=("--network", network)
    )
    return {OURS: ours, **_loops(network)}


CONTESTANTS: Mapping[str, Mapping[str, Contestant]] = {
    TUTORIAL: {
        OURS: Contestant(
            title="trainer (ours)",
            script="examples/mnist.py",
            options=(*_EXAMPLE, "--no-channels-last", "--warmup-epochs", "1", "--decay", "none", "--dataset", "mnist"),
            record=True,
        ),
        "plain": Contestant(
            title="plain Horovod example, DataLoader",
            script="examples/mnist_plain.py",
            options=_EXAMPLE,
            same_losses=False,
            rounded=True,
        ),
        **_loops(TUTORIAL),
    },
    TRANSFORMER: _with_handle(TRANSFORMER),
    RESNET: _with_handle(RESNET),
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
    if contestant.record:
        command += ["--output", str(record)]
    if ranks == 1:
        command = on_one_core(command)
    finished = run(command, timeout_s=settings.timeout_s, threads=1, variables=settings.two_hosts)
    report, problem = None, finished.problem
    if problem is None:
        report = read_report(finished, record if contestant.record else None)
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


def read_report(finished: Finished, record: Path | None) -> Report | None:
    """Return a run's report, from its record, its report line or its epoch lines; None when it has none of them."""
    if record is not None:
        epochs = record / "epochs.jsonl"
        return _from_record(epochs.read_text()) if epochs.exists() else None
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
        score, worst = (workload.score_format.format(one) for one in (report.score, workload.worst_score))
        return f"WRONG: {score} is worse than {worst}"
    return None


def differing_losses(runs: Sequence[Run]) -> list[str]:
    """Describe the runs of a network whose losses differ from its first run's, where they must be the same.

    The sum of two ranks' gradients does not depend on their order, so MPI and Gloo give the same bits. More ranks end
    with losses that are `_ROUNDING` apart at most.
    """
    found = []
    for network, ranks in sorted({(one.network, one.ranks) for one in runs}):
        exact = [
            one
            for one in runs
            if (one.network, one.ranks) == (network, ranks)
            and one.report
            and CONTESTANTS[network][one.contestant].same_losses
        ]
        for other in exact[1:]:
            assert exact[0].report is not None
            assert other.report is not None
            pairs = zip(other.report.losses, exact[0].report.losses, strict=True)
            if any(not math.isclose(*pair, rel_tol=_ROUNDING if ranks > 2 else 0.0) for pair in pairs):
                found.append(
                    f"{network}: {other.contestant} and {exact[0].contestant} on {ranks} ranks (round {other.round}): "
                    f"training losses {other.report.losses} and {exact[0].report.losses}"
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
