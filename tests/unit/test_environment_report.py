"""`trainer env` and `trainer --version`: what a bug report needs, and no secrets."""

from __future__ import annotations

import pytest

from trainer.cli import main
from trainer.ops import environment


def test_it_has_the_versions_and_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "_built", lambda: "PyTorch has gloo")
    monkeypatch.setenv("TRAINER_SECRET", "f00d" * 16)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    lines = dict(line.removeprefix("* ").split(": ", 1) for line in shown.splitlines())
    assert set(lines) == {
        "versions",
        "builds",
        "programs",
        "system",
        "machine",
        "GPUs",
        "network",
        "launcher",
        "variables",
    }
    assert "PyTorch 2." in lines["versions"]
    assert "TRAINER_SECRET=(set)" in lines["variables"]
    assert "NCCL_DEBUG=INFO" in lines["variables"]
    assert "f00d" not in shown
    assert "WANDB" not in shown


def test_libraries_that_cannot_be_imported_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_BUILD", "print('PyTorch has gloo'); raise OSError('libmpi.so.40: no such file')")
    assert environment._built() == "PyTorch has gloo; importing them fails: OSError: libmpi.so.40: no such file"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("trainer 0.")
