"""The node's entry point and its keys, with the real ssh-keygen and without a container."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import keys
import node
import pytest

from trainer.errors import TrainerError

pytestmark = pytest.mark.needs("ssh-keygen")
NODE = Path(node.__file__)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    folder.mkdir()
    keys.create(folder, ["a", "b"], 2222)
    return folder


def exported(folder: Path, name: str) -> io.BytesIO:
    stream = io.BytesIO()
    keys.export_keys(folder, name, stream)
    stream.seek(0)
    return stream


def modes_of_private_keys(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*ed25519*") if path.is_file() and not path.suffix}


def test_create_generates_one_key_pair_and_pins_every_host(cluster: Path) -> None:
    lines = (cluster / "known_hosts").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["[a]:2222", "ssh-ed25519"], ["[b]:2222", "ssh-ed25519"]]
    assert lines[0].split()[2] != lines[1].split()[2]
    assert keys.pinned_names(cluster) == ["a", "b"]
    assert modes_of_private_keys(cluster) == {0o600}


@pytest.mark.parametrize("name", ["../x", "", "-a", "a b", "a/b"])
def test_an_invalid_host_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TrainerError, match="is not a host name; valid are"):
        keys.create(tmp_path, ["a", name], 2222)
    assert not list(tmp_path.iterdir())


def test_an_export_holds_the_keys_of_one_node_only(cluster: Path, tmp_path: Path) -> None:
    other = tmp_path / "other machine"
    other.mkdir()
    assert keys.import_keys(other, exported(cluster, "b")) == ["b"]
    assert (other / "id_ed25519").read_bytes() == (cluster / "id_ed25519").read_bytes()
    assert keys.pinned_names(other) == ["a", "b"]
    assert not (other / "nodes" / "a").exists()
    assert modes_of_private_keys(other) == {0o600}


def test_keys_of_another_cluster_are_not_overwritten(cluster: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    keys.create(other, ["b"], 2222)
    before = (other / "id_ed25519").read_bytes()
    with pytest.raises(TrainerError, match="holds the keys of another cluster"):
        keys.import_keys(other, exported(cluster, "b"))
    assert (other / "id_ed25519").read_bytes() == before


@pytest.mark.parametrize("name", ["../authorized_keys", "nodes/../../x", "/etc/passwd", "id_rsa"])
def test_an_archive_with_another_file_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for member in ("id_ed25519", "id_ed25519.pub", "known_hosts", name):
            archive.addfile(tarfile.TarInfo(member))
    stream.seek(0)
    with pytest.raises(TrainerError, match="not one of a cluster's keys"):
        keys.import_keys(tmp_path, stream)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("port", ["22", "x", "70000"])
def test_an_invalid_port_is_one_line(tmp_path: Path, port: str) -> None:
    done = subprocess.run(
        [sys.executable, str(NODE), "serve"], capture_output=True, text=True, check=False,
        env={"TRAINER_CLUSTER_DIR": str(tmp_path), "TRAINER_SSH_PORT": port, "PATH": "/usr/bin"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"trainer: TRAINER_SSH_PORT is '{port}'; valid are 1024 to 65535\n")


def test_sshd_listens_on_the_route_to_the_other_nodes(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"a": "127.0.1.1", "b": "10.0.0.1"}
    monkeypatch.setattr(node, "route_to", routes.get)
    monkeypatch.delenv("TRAINER_LISTEN", raising=False)
    assert node.listen_address(cluster, "a") == "10.0.0.1"
    routes["b"] = "127.0.0.1"
    with pytest.raises(TrainerError, match="set TRAINER_LISTEN"):
        node.listen_address(cluster, "a")
    monkeypatch.setenv("TRAINER_LISTEN", "10.9.9.9")
    assert node.listen_address(cluster, "a") == "10.9.9.9"


def test_a_login_gets_the_variables_of_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "environ", {"PATH": "/opt/venv/bin:/bin", "NCCL_DEBUG": "INFO", "TOKEN": "x", "OMPI_X": 'a"b'}
    )
    assert node.ssh_environment() == '"NCCL_DEBUG=INFO" "PATH=/opt/venv/bin:/bin"'


def test_the_health_check_starts_without_pytorch() -> None:
    code = "import sys, node; print(node.route_to.__module__, 'torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=NODE.parent, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("trainer.cluster.network False False\n", "")
