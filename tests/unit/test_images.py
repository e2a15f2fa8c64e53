"""The Dockerfiles are made from one, and say which versions the lock has."""

from __future__ import annotations

import json
import py_compile
import re
import subprocess
from pathlib import Path
from typing import Any

import audit
import bases
import image_packages
import pytest
from gpu_dockerfile import gpu_dockerfile

ROOT = Path(__file__).resolve().parents[2]


def test_lines_for_gpus_replace_the_one_above_or_are_added() -> None:
    text = "# cpu only {\nA\n# }\nB\n# gpu: C\n# gpu+\n# gpu+ # D\nE\n"
    assert gpu_dockerfile(text) == "C\n\n# D\nE\n"


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
    assert set(images["Dockerfile.gpu"]) == set(bases.pinned((ROOT / "Dockerfile").read_text()))


def test_an_editors_container_is_of_the_cpu_image() -> None:
    file = ROOT / ".devcontainer" / "devcontainer.json"
    container = json.loads(file.read_text())
    build = container["build"]
    assert (file.parent / build["context"]).resolve() == ROOT
    lines = [f"--shell /bin/bash {container['remoteUser']} ", f"WORKDIR {container['workspaceFolder']}\n"]
    for line in (*lines, *(f"ARG {name}=" for name in build["args"])):
        assert line in (file.parent / build["dockerfile"]).read_text(), line


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
