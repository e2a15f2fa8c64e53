"""Each benchmark that starts jobs, in its shortest form: it ends well, and its report has the figures."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from benchmarks.compare import decompress_mnist
from benchmarks.contestants import CONTESTANTS, ON_DDP, RunSettings, differing_losses, start
from benchmarks.workloads import TUTORIAL
from examples.datasets.mnist import FILES

WITH_HOROVOD = tuple(name for name in CONTESTANTS[TUTORIAL] if name not in ON_DDP)


def make_noise(folder: Path) -> RunSettings:
    """Write an MNIST of 800 images of noise below `folder`."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part, samples in (("train", 800), ("test", 200)):
        images, labels = FILES[part]
        pixels = torch.randint(256, (samples, 28, 28), generator=generator, dtype=torch.uint8)
        digits = torch.randint(10, (samples,), generator=generator, dtype=torch.uint8)
        for name, head, values in (
            (images, struct.pack(">4I", 0x803, samples, 28, 28), pixels),
            (labels, struct.pack(">2I", 0x801, samples), digits),
        ):
            (raw / f"{name}.gz").write_bytes(gzip.compress(head + values.numpy().tobytes()))
    plain = folder / "plain"
    decompress_mnist(raw, plain)
    return RunSettings(data_dir=folder, plain_data_dir=plain, work_dir=folder, epochs=2, timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("ours", "limit"),
        ("ours", "ddp"),
        pytest.param(("ours", "fabric", "accelerate"), marks=pytest.mark.needs("peers")),
        WITH_HOROVOD,
    ],
)
def test_contestants_train_on_two_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    """All exact contestants end with the same losses to the last bit; the limit does not."""
    settings = make_noise(tmp_path)
    runs = [start(TUTORIAL, name, 2, 0, settings) for name in names]
    for run in runs:
        assert run.report is not None, run.problem
        # Epoch lines round the seconds to hundredths, which tells few samples in little time only roughly.
        is_rounded = CONTESTANTS[TUTORIAL][run.contestant].rounded
        rounding = 1 + 800 * 0.005 / (run.report.seconds[-1] - 0.005) if is_rounded else 0
        assert run.report.samples[-1] == pytest.approx(800, abs=rounding)
        assert run.report.evaluated == 200
        assert run.problem is not None, "so few samples are not MNIST, and must not count"
    assert differing_losses(runs) == []
    losses = {run.contestant: run.report.losses for run in runs if run.report is not None}
    if "limit" in names:
        assert losses["limit"] != losses["ours"], "the limit exchanged its gradients"
