"""examples/object_store.py with a real S3 server, over a connection that breaks for good."""

from __future__ import annotations

import re
import socket
import socketserver
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.launching import PEERS
from tests.distributed.harness import Outcome, command_for, run_job, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.needs("peers")]

PYTHON = str(PEERS / "bin/python")
TRAINING = ["examples/mnist.py", "--dataset", "digits", "--epochs", "6", "--checkpoint-every", "1", "--checkpoint"]


@pytest.fixture
def store() -> Iterator[str]:
    """The address of an S3 server with a bucket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 60, lambda: "moto does not answer")
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
        yield f"127.0.0.1:{port}"
        process.kill()


def stored(store: str) -> list[str]:
    with urllib.request.urlopen(f"http://{store}/bucket") as answer:
        return re.findall(r"<Key>run/([^<]*)", answer.read().decode())


@pytest.fixture
def breaking(store: str) -> Iterator[str]:
    """The address of a connection to the store, which breaks as the second checkpoint's state is half uploaded."""
    names: set[bytes] = set()

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            host, port = store.split(":")
            with socket.create_connection((host, int(port))) as server:
                threading.Thread(target=self.answer, args=(server,), daemon=True).start()
                while len(names) < 2 and (data := self.request.recv(65536)):
                    names.update(re.findall(rb"PUT \S+/(\S+)/state.pt", data))
                    server.sendall(data if len(names) < 2 else data[: len(data) // 2])

        def answer(self, server: socket.socket) -> None:
            with suppress(OSError):
                while data := server.recv(65536):
                    self.request.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()


def train(address: str, folder: Path) -> Outcome:
    script = ["examples/object_store.py", "s3://bucket/run", str(folder), "--every-s", "0.2", "--"]
    script += command_for("horovodrun-gloo", 2, [*TRAINING, str(folder), "--output", f"{folder}-output"])
    access = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL": f"http://{address}"}
    return run_job("python", 1, script, env={**access, "AWS_MAX_ATTEMPTS": "1"}, python=PYTHON)


def test_a_connection_that_breaks_ends_no_training(store: str, breaking: str, tmp_path: Path) -> None:
    first = train(breaking, tmp_path / "first")
    [accuracy] = re.findall(r"epoch 6/6.*accuracy [\d.]+ %", first.output)
    assert first.code == 1, first.output
    assert first.output.count("object_store: WARNING") == 1, first.output
    assert f"is in {tmp_path}/first only, not in s3://bucket/run" in first.output
    [whole] = [name for name in stored(store) if "manifest" in name]

    second = train(store, tmp_path / "second")
    assert second.code == 0, second.output
    assert f"going on from checkpoint {whole.split('/')[0]}" in second.output
    assert accuracy in second.output, "it ends as a training does that was not interrupted"
    here = {path.name for path in (tmp_path / "second").glob("attempt-*")}
    assert max(here) in {name.split("/")[0] for name in stored(store)} <= here, "what was half there is removed"
