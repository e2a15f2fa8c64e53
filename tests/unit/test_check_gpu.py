"""The check of a machine with GPUs, on one that has none: what it refuses, and what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import check_gpu
import pytest
import torch

from trainer import TrainerError


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replaces the launchers by what they would leave; returns what was launched."""
    calls: list[tuple[str, int]] = []

    def launch(launcher: str, ranks: int, script: list[str], what: str) -> None:
        calls.append((launcher, ranks))
        if "--json" in script:
            row = {"transport": "NCCL", "ranks": ranks, "size": 2**20, "in_place_s": 2**20 / 1e9}
            Path(script[script.index("--json") + 1]).write_text(json.dumps({"rows": [row]}))
            return
        folder = Path(script[script.index("--output") + 1])
        folder.mkdir()
        over = {"horovodrun": "Horovod over NCCL", "torchrun": "DDP over NCCL"}[launcher]
        (folder / "settings.json").write_text(json.dumps({"strategy": launcher, "description": over}))
        record = {"samples": 60_000, "validation": {"metrics": {"accuracy": 0.992}}}
        lines = [json.dumps(record | {"seconds": seconds}) for seconds in (9.0, 2.0, 4.0)]
        (folder / "epochs.jsonl").write_text("\n".join(lines))

    monkeypatch.setattr(check_gpu, "_launch", launch)
    return calls


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str, gpus: int = 2) -> int:
    monkeypatch.setattr("sys.argv", ["check_gpu.py", *arguments])
    monkeypatch.setattr(check_gpu, "report_failures", lambda: None)
    monkeypatch.setattr(check_gpu, "has_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA A100")
    return check_gpu.main()


def test_figures_of_one_and_of_all_gpus_are_printed_under_their_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: list[tuple[str, int]]
) -> None:
    assert start(monkeypatch, "--skip-tests") == 0
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert "## 2 × NVIDIA A100\n\nPyTorch " in printed
    assert "| horovodrun | 2 | bf16 | 3.00 | 20,000 | 99.20 % |" in printed
    assert "| NCCL | 2 | 1,048,576 | 1,049 | 1.0 |" in printed
    assert launched == [
        *[("horovodrun", 1)] * 2, *[("torchrun", 1)] * 2, *[("horovodrun", 2)] * 2, *[("torchrun", 2)] * 2,
        ("horovodrun", 2), ("torchrun", 2),
    ]  # fmt: skip


def test_one_gpu_has_no_all_reduce_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: list[tuple[str, int]]
) -> None:
    assert start(monkeypatch, "--skip-tests", "--launchers", "torchrun", gpus=1) == 0
    assert launched == [("torchrun", 1)] * 2
    assert "bandwidth" not in capsys.readouterr().out


def test_the_tests_come_first_and_end_it_where_they_fail(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, int]]
) -> None:
    ran: list[list[str]] = []

    def fail(command: list[str], **_: object) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(TrainerError, match=r"^tests/gpu failed, see above"):
        start(monkeypatch)
    assert ran[0][-1] == "tests/gpu"
    assert launched == []


def test_gradients_that_did_not_go_over_nccl_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(launcher: str, ranks: int, script: list[str], what: str) -> None:
        folder = Path(script[script.index("--output") + 1])
        folder.mkdir()
        (folder / "settings.json").write_text(json.dumps({"strategy": "x", "description": "Horovod over MPI"}))
        (folder / "epochs.jsonl").write_text("")

    monkeypatch.setattr(check_gpu, "_launch", launch)
    with pytest.raises(TrainerError, match="not all-reduced over NCCL: Horovod over MPI"):
        start(monkeypatch, "--skip-tests")


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainerError, match="PyTorch finds no GPU on this machine"):
        start(monkeypatch, gpus=0)
