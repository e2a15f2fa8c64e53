"""A rank's own C++ code at a rendezvous that is not its launcher's: it takes no answer without a proof, and ends."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.http import proof

from tests.security.stores import HOST, KEY

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]
PROGRAM = "import horovod.torch as hvd; hvd.init(); print('joined', hvd.size())"


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request with 200, and proves that with the key of its server, where it has one."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(self.command)  # type: ignore[attr-defined]
        key: bytes | None = self.server.key  # type: ignore[attr-defined]
        self.send_response_only(200)
        self.send_header("Content-Length", "0")
        if key is not None:
            self.send_header(proof.HEADER, proof.answer_mac(key, self.headers[proof.HEADER].split()[3], 200, b""))
        self.end_headers()

    do_GET = do_PUT = do_DELETE = answer  # noqa: N815 (as the base class calls them)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def rendezvous(key: bytes | None) -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer((HOST, 0), Answers)
    server.key, server.requests = key, []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def start_rank(port: int) -> subprocess.Popen[str]:
    """Start rank 0 of 2, as horovodrun would."""
    places = {f"HOROVOD_{one}": "0" for one in ("RANK", "LOCAL_RANK", "CROSS_RANK")}
    sizes = {"HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_SIZE": "1"}
    env = os.environ | places | sizes | {
        "HOROVOD_HOSTNAME": "localhost", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": HOST, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port), "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "5", "HOROVOD_RENDEZVOUS_SECRET": KEY.hex(), "HOROVOD_LOG_LEVEL": "warning",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(None, id="without proof", marks=pytest.mark.slow),
        pytest.param(make_secret_key(), id="with another secret"),
    ],
)
def test_a_rank_takes_no_answer_without_a_proof(key: bytes | None) -> None:
    with rendezvous(key) as server, start_rank(server.server_address[1]) as rank:
        try:
            output, _ = rank.communicate(timeout=60)
        finally:
            rank.kill()
    assert rank.returncode != 0
    assert "joined" not in output
    said = f"rendezvous server at {HOST}:{server.server_address[1]} failed: the rendezvous server's answer has no proof"
    assert said in output
    # The first request and its repetitions: it went no further.
    assert server.requests == ["PUT"] * 3  # type: ignore[attr-defined]


@pytest.mark.slow
def test_with_a_proof_it_goes_on() -> None:
    with rendezvous(KEY) as server, start_rank(server.server_address[1]) as rank:
        try:
            rank.communicate(timeout=60)
        finally:
            rank.kill()
    assert "GET" in server.requests  # type: ignore[attr-defined]
