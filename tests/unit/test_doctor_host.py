"""The checks of a host, which `trainer doctor` runs there, on this host."""

from __future__ import annotations

import ast
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.ops.doctor.remote import host
from trainer.ops.doctor.remote.host import MIB, PROBLEM, WARNING, Job

SOURCES = sorted(Path(host.__file__).parent.glob("*.py"))


def job(path: Path, **changes: Any) -> Job:
    """Return a job of two ranks on host b."""
    whole = Job("b", 2, False, sys.executable, str(path), "", "", ["localhost", "no-such-host.invalid"], True)
    return whole._replace(**changes)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_source_is_python_3_8_and_needs_the_standard_library_only(source: Path) -> None:
    tree = ast.parse(source.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == ({"torch"} if source.stem == "all_reduce" else set())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"folder": "/no/such"}, "b has no folder /no/such, in which the job is started; copy the project there"),
        ({"python": "/no/python"}, "b has no /no/python, the job's Python; install the same"),
        ({"script": "missing.py"}, "there is no missing.py in"),
        ({"script": "scripts/train.py"}, "scripts/torch.py on b is imported in place of the package of that name"),
    ],
)
def test_files_that_are_missing_or_in_the_way(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("train", "torch"):
        (tmp_path / "scripts" / f"{name}.py").touch()
    ((level, said),) = host.check_files(job(tmp_path, **changes))
    assert level == PROBLEM
    assert line in said


USED = str(600 * MIB)
LEAVES = "on b, the memory limit of its container leaves 600 MiB for 2 ranks, each of which takes 512 MiB"
MEMORY_1 = {"limit_in_bytes": str(900 * MIB), "usage_in_bytes": USED, "stat": f"cache 1\ninactive_file {300 * MIB}"}
MEMORY_2 = {"max": str(900 * MIB), "current": USED, "stat": f"active_file {100 * MIB}\ninactive_file {200 * MIB}"}
CORES = "b has 1.5 of the 2 cores that its ranks need; name fewer slots (-H b:1)"


@pytest.mark.parametrize(
    ("prefix", "files", "check", "line"),
    [
        ("memory/memory", MEMORY_1, host.check_memory, LEAVES),
        ("memory", MEMORY_2, host.check_memory, LEAVES),
        ("cpu/cpu", {"cfs_quota_us": "150000", "cfs_period_us": "100000"}, host.check_cores, CORES),
        ("cpu", {"max": "150000 100000"}, host.check_cores, CORES),
    ],
)
def test_the_limits_of_a_container(
    prefix: str, files: dict[str, str], check: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert list(check(job(tmp_path))) == []
    for name, text in files.items():
        file = tmp_path / f"{prefix}.{name}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    ((_, said),) = check(job(tmp_path))
    assert said.startswith(line)


def test_a_host_that_lacks_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = host.check_shared_memory, host.check_open_files, host.check_disk
    monkeypatch.setattr(host, "_free", lambda _: 2000 * MIB)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert [finding for check in checks for finding in check(job(tmp_path))] == []
    monkeypatch.setattr(host, "_free", lambda _: 64 * MIB)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    shared, files, disk = (finding for check in checks for finding in check(job(tmp_path)))
    assert "has 64 MiB free, and its 2 ranks need 128" in shared[1]
    assert "on b, a process may have 256 open files" in files[1]
    assert f"the disk of {tmp_path} has 64 MiB free" in disk[1]
    monkeypatch.setattr(os, "access", lambda *_: False)
    ((level, said),) = host.check_disk(job(tmp_path))
    assert (level, "cannot be written by user" in said) == (WARNING, True)


def test_a_login_without_open_mpi_on_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(host.check_orted(job(tmp_path))) == []
    monkeypatch.setenv("PATH", "/no")
    ((_, said),) = host.check_orted(job(tmp_path))
    assert "finds no orted of Open MPI on its PATH (/no)" in said
    assert list(host.check_orted(job(tmp_path, is_here=True))) == []


SMI = """#!/bin/sh
case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.hw_slowdown" is not valid.'; exit 2 ;;
--query-gpu=*) printf '%s' "$LINES" ;;
esac
"""


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LINES", "0, A100, [N/A], Active\n1, GPU requires reset\n2, A100, 3, Not Active\n")
    slow, broken = (line for _, line in host.check_gpus(job(tmp_path)))
    assert slow.startswith("GPU 0 (A100) of b is slowed down because of its temperature or power supply; ")
    assert broken.startswith("GPU 2 (A100) of b has 3 uncorrected memory errors; ")
    assert list(host.check_gpus(job(tmp_path, with_gpus=False))) == []
    monkeypatch.setenv("PATH", "/no")
    ((_, none),) = host.check_gpus(job(tmp_path))
    assert none.startswith("b has 0 of the 2 GPUs that its ranks need; ")


def test_the_software_is_that_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    found = {title: value for title, value, _ in host.software(job(tmp_path, script="train.py"))}
    assert found["PyTorch"].startswith("2.")
    assert len(found["the code of trainer"]) == len(found["the training script"]) == 12
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    other = {title: value for title, value, _ in host.software(job(tmp_path, python_path="."))}
    assert other["the code of trainer"] != found["the code of trainer"]
    assert list(host.software(job(tmp_path, python="/no/python"))) == []


def test_names_and_interfaces(tmp_path: Path) -> None:
    assert dict(host.interfaces())["127.0.0.1"] == "lo"
    found = dict(host.names(job(tmp_path)))
    local = found["localhost"]
    assert (local["source"], local["interface"], local["error"]) == ("", "lo", ""), "no other host gets there"
    assert found["no-such-host.invalid"]["error"]
