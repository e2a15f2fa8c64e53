"""The parameter server over TLS: who has no certificate of the cluster's authority does not get as far as the token."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT
from trainer import ConfigError, TrainerError, World
from trainer.strategies.comparisons.parameter_server.strategy import (
    TLS_NAME,
    Certificates,
    ServerProcess,
    Stream,
    read_certificates,
)

pytestmark = pytest.mark.needs("openssl")
TOKEN = os.urandom(32).hex()
VALUES = b"gradient" * 500


def make(folder: Path) -> Certificates:
    folder.mkdir()
    page = (ROOT / "docs" / "security.md").read_text()
    script = next(block for block in page.split("```text\n") if block.startswith("openssl")).split("```")[0]
    assert f"DNS:{TLS_NAME} " in script
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True, capture_output=True, timeout=60)
    found = read_certificates({"TRAINER_TLS": str(folder)})
    assert found is not None
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def server(ours: Certificates) -> Iterator[ServerProcess]:
    process = ServerProcess("127.0.0.1", TOKEN, 1, 30.0, ours)
    yield process
    process._process.kill()
    process.close()


def exchange(endpoint: str, certificates: Certificates | None) -> bytes:
    """Send what one rank alone has to send; return the answer."""
    stream = Stream(endpoint, "gradients", TOKEN, World(), certificates)
    try:
        stream.push("float64", memoryview(VALUES))
        return bytes(stream.pull())
    finally:
        stream.close()


def test_ranks_with_certificates_exchange(server: ServerProcess, ours: Certificates) -> None:
    assert exchange(server.endpoint, ours) == VALUES


@pytest.mark.parametrize("what", ["plain", "another authority's", "without its own"])
def test_others_are_refused(server: ServerProcess, ours: Certificates, theirs: Certificates, what: str) -> None:
    shown = {
        "plain": None,
        "another authority's": Certificates(ours.authority, theirs.certificate, theirs.key),
        "without its own": theirs,
    }[what]
    with pytest.raises(TrainerError, match="lost the parameter server"):
        exchange(server.endpoint, shown)
    assert exchange(server.endpoint, ours) == VALUES


def test_what_is_no_certificate_is_named(tmp_path: Path) -> None:
    assert read_certificates({}) is None
    with pytest.raises(ConfigError, match=r"TRAINER_TLS: cannot read .*authority\.pem: No such file"):
        read_certificates({"TRAINER_TLS": str(tmp_path)})
    (tmp_path / "authority.pem").write_text("no")
    with pytest.raises(ConfigError, match=r"authority\.pem is no PEM file"):
        read_certificates({"TRAINER_TLS": str(tmp_path)})
