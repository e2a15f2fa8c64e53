"""A rank's own C++ code at a rendezvous that is not its launcher's, or without the key: it says so, and ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.security.stores import HOST, started

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]
PROGRAM = "import horovod.torch as hvd; hvd.init(); print('joined', hvd.size())"


def run_rank(port: int, key: str | None) -> tuple[int, str]:
    """Run rank 0 of 2, as horovodrun would; return its exit code and what it printed."""
    places = {f"HOROVOD_{name}": "0" for name in ("RANK", "LOCAL_RANK", "CROSS_RANK")}
    sizes = {"HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_SIZE": "1"}
    env = os.environ | places | sizes
    env |= {"HOROVOD_HOSTNAME": "localhost", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    env |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": HOST, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    env |= {"HOROVOD_GLOO_IFACE": "lo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3", "HOROVOD_LOG_LEVEL": "trace"}
    if key is not None:
        env["HOROVOD_RENDEZVOUS_KEY"] = key
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert "joined" not in done.stdout
    return done.returncode, done.stdout


def test_a_rank_with_another_key_is_not_served() -> None:
    with started() as store:
        code, output = run_rank(store.port, "0" * 32)
        assert store.names() == {"scope/key"}
    assert code != 0
    assert "0" * 32 not in output
    assert f"PUT request to the rendezvous server at {HOST}:{store.port} failed: status 404" in output


def test_a_rank_without_a_key_says_so() -> None:
    code, output = run_rank(9, None)
    assert code != 0
    assert "HOROVOD_RENDEZVOUS_KEY is not set; horovodrun sets it in every rank" in output
