"""The set-up scripts: help and one line for a user's mistake, and pip where uv does not work."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import build_horovod
import horovod_wheel
import packages
import prove_horovod
import pytest
import setup
from console import SetupError, run

INSTALL = Path(setup.__file__).parent
SCRIPTS = ("setup.py", "build_horovod.py", "prove_horovod.py", "image_packages.py", "wheels.py")


class Machine:
    """Records the commands of the set-up, and fails those that a test names."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.failing = ""

    def run(self, title: str, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.commands.append(command)
        self.environments.append(env or {})
        if self.failing and self.failing in f" {' '.join(command)} ":
            raise SetupError(f"{title} failed (exit code 1). The end of {log}:\nno such file\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    recorded = Machine()
    monkeypatch.setattr(packages, "run", recorded.run)
    monkeypatch.setattr(packages, "_pip_settings", lambda python: "")
    return recorded


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_shown_and_nothing_else_happens(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(INSTALL / script), "--help"]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={"HOME": str(tmp_path), "PATH": ""}
    )
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: {script}")
    assert shown.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["setup.py", "build_horovod.py", "image_packages.py", "wheels.py"])
def test_an_unknown_option_is_named(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(INSTALL / script), "--colour"]
    refused = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={"HOME": str(tmp_path), "PATH": ""}
    )
    assert refused.returncode == 2
    assert "--colour" in refused.stderr.splitlines()[-1]


def test_uv_installs_what_pip_is_not_needed_for(machine: Machine, tmp_path: Path) -> None:
    uv = packages.get_uv("/env/bin/python", tmp_path / "uv.log")
    packages.install("installing", "/env/bin/python", uv, ["--require-hashes"], tmp_path / "packages.log")
    assert uv == Path("/env/bin/uv")
    fetch, install = machine.commands
    assert "--require-hashes" in fetch
    assert install == ["/env/bin/uv", "pip", "install", "--python", "/env/bin/python", "--require-hashes"]


def test_pip_installs_where_uv_cannot_be_had(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.failing = "uv.txt"
    uv = packages.get_uv("/env/bin/python", tmp_path / "uv.log", tmp_path / "uv")
    arguments = ["--require-hashes", "--compile-bytecode"]
    packages.install("installing", "/env/bin/python", uv, arguments, tmp_path / "packages.log")
    assert uv is None
    assert capsys.readouterr().err == (
        "trainer: uv cannot be had (no such file); pip installs the packages, which takes longer\n"
    )
    # pip compiles bytecode unasked and has no option of that name.
    assert machine.commands[-1][:4] == ["/env/bin/python", "-m", "pip", "install"]
    assert machine.commands[-1][-1] == "--require-hashes"


def test_pip_installs_where_uv_fails(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.failing = "/uv pip install"
    uv = Path("/env/bin/uv")
    packages.install("installing", "/env/bin/python", uv, ["--require-hashes"], tmp_path / "packages.log")
    assert machine.commands[-1][:4] == ["/env/bin/python", "-m", "pip", "install"]
    assert "uv could not install the packages (no such file); trying pip" in capsys.readouterr().err


def test_the_set_up_ends_where_pip_fails_too(machine: Machine, tmp_path: Path) -> None:
    machine.failing = " install "
    with pytest.raises(SetupError, match="no such file"):
        packages.install("installing", "/env/bin/python", None, [], tmp_path / "packages.log")


def test_uv_asks_the_index_that_pip_was_told_to_ask(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    listed = ":env:.index-url='https://mirror.invalid/simple'\nglobal.cert='/etc/ca.pem'\nglobal.timeout='60'\n"
    monkeypatch.setattr(packages, "_pip_settings", lambda python: listed)
    packages.install("installing", "/env/bin/python", Path("/env/bin/uv"), [], tmp_path / "packages.log")
    assert machine.environments[-1]["UV_DEFAULT_INDEX"] == "https://mirror.invalid/simple"
    assert machine.environments[-1]["SSL_CERT_FILE"] == "/etc/ca.pem"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://other.invalid/simple")
    assert packages.uv_settings(listed) == {"SSL_CERT_FILE": "/etc/ca.pem"}


def test_uv_takes_a_file_from_any_index_where_its_hash_is_known(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_INDEX_STRATEGY", raising=False)
    for arguments in (["--require-hashes"], []):
        packages.install("installing", "/env/bin/python", Path("/env/bin/uv"), arguments, tmp_path / "packages.log")
    strategies = [environment.get("UV_INDEX_STRATEGY") for environment in machine.environments[-2:]]
    assert strategies == ["unsafe-best-match", None]


def test_a_machine_without_a_compiler_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["setup.py"])
    assert setup.main() == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "this machine lacks g++" in message
    assert "install with: sudo" in message


def test_a_full_disk_is_named_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup, "_missing_packages", list)
    monkeypatch.setattr(setup, "VENV", tmp_path / "none")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3e9))
    with pytest.raises(SetupError, match=r"has 3\.0 GB free; the environment needs 8 GB"):
        setup._check_machine()


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('[ 50%] half'); print('and then it broke'); raise SystemExit(3)"]
    with pytest.raises(SetupError, match=r"trying failed \(exit code 3\)[\s\S]*and then it broke"):
        run("trying", command, tmp_path / "try.log")


def test_a_source_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "horovod-0.28.1.tar.gz"
    other.write_bytes(b"something else")
    with pytest.raises(SetupError, match=r"its SHA-256 is \w{64}, but horovod\.txt pins 92a43f5a"):
        horovod_wheel.build_wheel(tmp_path, horovod_wheel.Variant(), other)
    with pytest.raises(SetupError, match="there is no such file"):
        horovod_wheel.build_wheel(tmp_path, horovod_wheel.Variant(), tmp_path / "missing.tar.gz")


def test_the_wheels_folder_changes_with_every_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = horovod_wheel.Variant()
    first = build_horovod._cache_key(variant)
    assert first == build_horovod._cache_key(variant)
    monkeypatch.setattr(horovod_wheel, "CHANGES", tmp_path)
    without = build_horovod._cache_key(variant)
    (tmp_path / "0001-new.patch").write_text("new")
    assert len({first, without, build_horovod._cache_key(variant)}) == 3


def test_no_ranks_are_tried_over_mpi_under_an_emulator_that_keeps_them_from_starting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Emulated(socket.socket):
        def getsockopt(self, *options: int) -> bytes:  # type: ignore[override]
            return b""

    tried: list[str] = []
    monkeypatch.setattr(prove_horovod, "_check_parts", lambda *parts: None)
    monkeypatch.setattr(prove_horovod, "_check_two_ranks", lambda command, env: tried.append(command[3]))
    prove_horovod.prove("none")
    assert tried == ["--mpi", "--gloo"]
    monkeypatch.setattr("socket.socket", Emulated)
    prove_horovod.prove("none")
    assert tried == ["--mpi", "--gloo", "--gloo"]
    assert "WARNING: over MPI no ranks were tried" in capsys.readouterr().err
