"""`trainer env` and `trainer --version`: what a bug report needs, and no secrets."""

from __future__ import annotations

import errno

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


def test_interfaces_that_do_not_answer_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    monkeypatch.setattr("psutil.net_if_stats", refuse)
    assert list(environment._interfaces()) == ["unknown: Inappropriate ioctl for device"]


def test_an_import_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_BUILD", "import time; time.sleep(60)")
    monkeypatch.setattr(environment, "_BUILT_S", 0.2)
    assert environment._built() == "importing PyTorch and Horovod has not ended after 0.2 s"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("OMPI_MCA_orte_hnp_uri", "1532166144.0;tcp://10.0.0.1:43211", "(set)"),
        ("OMPI_MCA_orte_local_daemon_uri", "of no known form", "(set)"),
        ("TRAINER_REMOTE", "ssh://node-7", "(set)"),
        ("TRAINER_CALLER", "someone@node-7", "(set)"),
        ("NCCL_COMM_ID", "10.0.0.1:5000", "(set)"),
        ("NCCL_COMM_ID", "[fd00::2]:5000", "(set)"),
        ("TRAINER_NETWORK", "fd00:0:0:1:0:0:0:0", "(set)"),
        ("TRAINER_PARAMETER_SERVERS", "node-7:5000", "(set)"),
        ("OMPI_MCA_orte_precondition_transports", "78da1348cb775a51-3707668747acbb60", "(set)"),
        ("PYTHONUSERBASE", "/home/someone", "(set)"),
        ("UCX_NET_DEVICES", "mlx5_0:1,mlx5_1:1", "mlx5_0:1,mlx5_1:1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1024", "max_split_size_mb:1024"),
        ("TORCH_CUDA_ARCH_LIST", "8.0 9.0", "8.0 9.0"),
        ("OMP_NUM_THREADS", "2", "2"),
    ],
)
def test_a_variable_with_an_address_is_named_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, shown: str
) -> None:
    monkeypatch.setattr(environment, "_built", lambda: "")
    monkeypatch.setenv(name, value)
    variables = dict(environment.describe())["variables"]
    assert f"{name}={shown}" in variables


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("trainer 0.")
