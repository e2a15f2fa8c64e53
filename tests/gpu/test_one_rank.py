"""What one rank does on one GPU: precisions, orders of memory, compilation, and the tools that measure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import trainer
from tests.distributed.harness import run_job
from tests.gpu.machine import DEVICE, JOB_TIMEOUT_S, ON_GPU, has_package, need, share, transport

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 60)

MNIST = ["examples/mnist.py", "--dataset", "digits", "--epochs", "3", "--output", "none", "--device", DEVICE]
TARGET = ["--target-accuracy", "70"]  # an untrained network has 10 %
needs_digits = pytest.mark.skipif(not has_package("sklearn"), reason="there is no scikit-learn, which has the digits")
OPTIONS = {
    "fp32": [],
    "bf16": ["--precision", "bf16"],
    "fp16": ["--precision", "fp16"],
    "channels first": ["--no-channels-last", "--precision", "bf16"],
    "accumulated": ["--accumulate", "2", "--batch-size", "50"],
    "compiled": ["--compile"],
}


@needs_digits
@pytest.mark.parametrize("name", OPTIONS)
def test_the_digits_are_learned(name: str) -> None:
    if name == "compiled" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("torch.compile needs a C compiler")
    outcome = run_job("python", 1, [*MNIST, *TARGET, *OPTIONS[name]], timeout_s=JOB_TIMEOUT_S)
    assert outcome.code == 0, outcome.output
    assert f"({'cuda:0' if ON_GPU else 'cpu'})" in outcome.output
    assert "evaluated 297/297" in outcome.output


@needs_digits
@pytest.mark.parametrize(("strategy", "launcher"), [("horovod", "horovodrun-mpi"), ("ddp", "torchrun")])
def test_the_digits_are_learned_through_the_launchers(strategy: str, launcher: str) -> None:
    need(strategy, launcher)
    outcome = run_job(launcher, 1, [*MNIST, *TARGET], timeout_s=JOB_TIMEOUT_S)
    assert outcome.code == 0, outcome.output
    assert f"{transport(strategy, launcher)}rank 0 of 1" in outcome.output


def _device_and_square(value: torch.Tensor) -> tuple[str, torch.Tensor]:
    given = value.device.type
    return given, value.to(DEVICE) ** 2


def test_a_function_is_launched_after_the_gpu_was_used_and_tensors_come_as_the_cpu_s() -> None:
    need("horovod", "horovodrun-gloo")
    value = torch.full((2,), 3.0, device=DEVICE)
    ((given, square),) = trainer.launch(_device_and_square, value, np=1, launcher="gloo")
    assert (given, square.device.type, square.tolist()) == ("cpu", "cpu", [9.0, 9.0])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("launcher", "transports"),
    [("horovodrun-mpi", ["nccl", "horovod"]), ("torchrun", ["nccl"])],
    ids=lambda one: str(one),
)
def test_sums_of_the_communication_benchmark_are_right(
    launcher: str, transports: list[str], ranks: int, tmp_path: Path
) -> None:
    need("horovod" if "horovod" in transports else "ddp", launcher)
    wanted = transports if ON_GPU else ["gloo" if one == "nccl" else one for one in transports]
    file = tmp_path / "comm.json"
    options = ["--only", *wanted, "--sizes", "4", "1M", "--repeats", "1", "--device", DEVICE, "--json", str(file)]
    outcome = run_job(launcher, ranks, ["scripts/comm_bench.py", *options], env=share(ranks), timeout_s=JOB_TIMEOUT_S)
    assert outcome.code == 0, outcome.output
    rows = json.loads(file.read_text())["rows"]
    assert {(row["key"], row["size"]) for row in rows} == {(key, size) for key in wanted for size in (4, 2**20)}
    assert {row["wrong"] for row in rows} == {0}
    assert all("NCCL" in row["transport"] for row in rows) == ON_GPU
