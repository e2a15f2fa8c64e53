"""`srun`, on a Slurm of one node that this test starts for itself."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import BIN, ROOT

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not all(shutil.which(name) for name in ("slurmctld", "slurmd", "srun", "munged")) or os.geteuid() != 0,
        reason="needs Slurm and root to start it: apt-get install slurm-wlm munge libpmix-dev",
    ),
]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which srun finds a cluster of this host alone, with two task slots."""
    # Not pytest's tmp_path: the path of munge's socket has to be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    conf = CONF.format(host=host, folder=folder, ports=free_ports(2), cores=os.cpu_count() or 1)
    (folder / "slurm.conf").write_text(conf)
    env = dict(os.environ, SLURM_CONF=str(folder / "slurm.conf"), PATH=f"{BIN}:/usr/sbin:{os.environ['PATH']}")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    commands = [
        ["munged", "--foreground", "--force", "--key-file", str(folder / "munge.key"), "--socket",
         str(folder / "munge.socket"), "--pid-file", str(folder / "munge.pid"), "--log-file", str(folder / "munge.log"),
         "--seed-file", str(folder / "munge.seed")],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]  # fmt: skip
    log = (folder / "daemons.log").open("w")
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            time.sleep(1)
        wait_until_idle(env, folder)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=20)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_idle(env: dict[str, str], folder: Path) -> None:
    for _ in range(30):
        state = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False)
        if state.stdout.strip() == "idle":
            return
        time.sleep(1)
    logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
    pytest.fail(f"Slurm did not start: {state.stdout}{state.stderr}\n{logs[-3000:]}")


def srun(env: dict[str, str], mpi: str) -> subprocess.CompletedProcess[str]:
    script = ["examples/mnist.py", "--dataset", "digits", "--epochs", "1", "--output", "none", "--device", "cpu"]
    command = ["srun", "-n", "2", "--overcommit", f"--mpi={mpi}", str(BIN / "python"), *script]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_srun_trains_through_horovod(slurm: dict[str, str]) -> None:
    done = srun(slurm, "pmix")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert "evaluated 297/297" in done.stdout
    assert "Horovod over MPI, rank 0 of 2" in done.stderr
    assert "component was not found" not in done.stderr


def test_srun_without_pmix_is_refused(slurm: dict[str, str]) -> None:
    done = srun(slurm, "none")
    assert done.returncode != 0
    assert "start with `srun --mpi=pmix`" in done.stderr
    assert "Traceback" not in done.stderr
