"""Jobs that use what the patches protect still work, and show their secret to nobody."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.distributed.harness import command_for, processes_of
from tests.security.running import Running, elastic, function, running

pytestmark = pytest.mark.distributed
HERE = Path(__file__).parent
NAMES = ("HOROVOD_RENDEZVOUS_SECRET", "TRAINER_SECRET")


def wait_for(text: str, job: Running, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in job.text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert text in job.text()


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
@pytest.mark.parametrize(("name", "results"), [("square", "[0, 1]"), ("large", "[20000000, 20000000]")])
def test_a_function_runs_on_all_ranks(launcher: str, name: str, results: str) -> None:
    with running(function(name, launcher)) as job:
        assert job.process.wait(120) == 0, job.text()
        assert f"results: {results}" in job.text()


def test_a_host_joins_an_elastic_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank asks for its number, the other one is notified, and both meet again."""
    monkeypatch.setenv("WAIT_FOR_SIZE", "2")
    command = elastic(tmp_path, sys.executable, str(HERE / "elastic_training.py"))
    with running(command) as job:
        wait_for("step 2 of 1", job)
        (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
        assert job.process.wait(150) == 0, job.text()
        assert job.text().count("finished with 5 together of 2") == 2, job.text()


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", "horovodrun-mpi", "trainer run"])
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
        found = {process.environ().get(name) for process in processes for name in NAMES} - {None}
        lines = [" ".join(process.cmdline()) for process in processes]
        (tmp_path / "go").touch()
        assert job.process.wait(90) == 0, job.text()
        said = job.text()
    assert len(found) == (2 if launcher == "trainer run" else 1)
    assert {len(secret or "") for secret in found} == {64}
    assert not [line for line in lines for secret in found if secret and secret in line]
    assert not [secret for secret in found if secret and secret in said]


def test_two_jobs_have_two_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one in the caller's environment is not taken over."""
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", "ab" * 32)
    seen = set()
    for _ in range(2):
        code = "import os; print('secret', os.environ['HOROVOD_RENDEZVOUS_SECRET'])"
        with running(command_for("horovodrun-gloo", 1, ["-c", code])) as job:
            assert job.process.wait(60) == 0, job.text()
            seen.add(job.text().split("secret ")[1].split()[0])
    assert len(seen) == 2
    assert "ab" * 32 not in seen
