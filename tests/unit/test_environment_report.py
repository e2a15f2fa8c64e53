"""`trainer env` and `trainer --version`: what a bug report needs, and no secrets."""

from __future__ import annotations

import pytest

from trainer.cli import main
from trainer.ops import environment


def test_it_has_all_reports_and_no_values_of_variables(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    says = "print('PyTorch version: 2.14')", "raise OSError('libmpi.so.40: no such file')"
    monkeypatch.setattr(environment, "_REPORTS", [("-c", script) for script in says])
    monkeypatch.setenv("TRAINER_SECRET", "f00d" * 16)
    monkeypatch.setenv("NCCL_COMM_ID", "10.0.0.1:5000")
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    assert main(["env"]) == 0
    shown = capfd.readouterr().out
    for line in ("PyTorch version: 2.14\n", "OSError: libmpi.so.40: no such file\n", "Versions: horovod-trainer 0."):
        assert line in shown
    variables = shown.split("Variables that are set: ")[1]
    assert {"TRAINER_SECRET", "NCCL_COMM_ID"} <= set(variables.strip().split(", "))
    assert not any(value in shown for value in ("f00d", "10.0.0.1", "WANDB"))


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("trainer 0.")
