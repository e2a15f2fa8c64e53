"""Jobs show their secret, and the key of their rendezvous, to nobody."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.distributed.harness import command_for, processes_of
from tests.security.running import Running, running

pytestmark = pytest.mark.distributed
HERE = Path(__file__).parent
SECRETS = {"HOROVOD_JOB_SECRET": 64, "HOROVOD_RENDEZVOUS_KEY": 32, "TRAINER_SECRET": 64}
"""What a job has of its own, and how many hexadecimal digits that are."""
HAS = {
    "horovodrun-gloo": ["HOROVOD_JOB_SECRET", "HOROVOD_RENDEZVOUS_KEY"],
    "horovodrun-mpi": ["HOROVOD_JOB_SECRET"],
    "trainer run": ["HOROVOD_JOB_SECRET", "TRAINER_SECRET"],
}


def wait_for(text: str, job: Running, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in job.text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert text in job.text()


@pytest.mark.parametrize("launcher", HAS)
def test_the_secret_is_in_the_ranks_environment_and_on_no_command_line(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAIT_FOR", str(tmp_path / "go"))
    script = [str(HERE / "job_that_waits.py"), "horovod"]
    command = command_for(launcher, 2, script)
    if launcher == "trainer run":
        command = [sys.executable, "-m", "trainer", "run", "-np", "2", sys.executable, *script]
    with running(command, folder=tmp_path) as job:
        wait_for("ready", job)
        processes = processes_of(job.mark)
        environments = [process.environ() for process in processes]
        seen = {(name, environment[name]) for environment in environments for name in SECRETS if name in environment}
        lines = [" ".join(process.cmdline()) for process in processes]
        (tmp_path / "go").touch()
        assert job.process.wait(90) == 0, job.text()
        said = job.text()
    assert sorted(name for name, _ in seen) == HAS[launcher]
    for name, secret in seen:
        assert len(secret) == SECRETS[name]
        assert not [line for line in lines if secret in line]
        assert secret not in said


def test_two_jobs_have_two_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those in the caller's environment are not taken over."""
    names = HAS["horovodrun-gloo"]
    seen = ["ab" * 32, "ab" * 16]
    for name, secret in zip(names, seen, strict=True):
        monkeypatch.setenv(name, secret)
    for _ in range(2):
        code = f"import os; print('secrets', *(os.environ[name] for name in {names}))"
        with running(command_for("horovodrun-gloo", 1, ["-c", code])) as job:
            assert job.process.wait(60) == 0, job.text()
            seen += job.text().split("secrets ")[1].split()[:2]
    assert len(set(seen)) == len(seen)
