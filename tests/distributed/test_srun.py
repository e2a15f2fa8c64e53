"""`srun`, on a Slurm of one node that this test starts for itself."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.harness import BIN, ROOT, checks_in, run_checks, run_job, wait_until
from tests.distributed.snippets import in_shell
from tests.distributed.test_libraries import check_libraries

pytestmark = pytest.mark.needs("slurm", "root")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=2
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
    """What has to be in the environment for srun to find a cluster of this host alone."""
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
            if command[0] == "munged":  # without which the others end
                wait_for(folder, "munge", (folder / "munge.socket").exists)
        wait_for(folder, "the node", lambda: state_of_the_node(env) == "idle")
        yield {"SLURM_CONF": env["SLURM_CONF"]}
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=20)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def state_of_the_node(env: dict[str, str]) -> str:
    done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def wait_for(folder: Path, what: str, ready: Callable[[], bool]) -> None:
    def why() -> str:
        logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
        return f"Slurm does not start: {what} is not ready\n{logs[-3000:]}"

    wait_until(ready, 60, why)


def test_every_shared_check_passes_under_srun(slurm: dict[str, str]) -> None:
    checks = run_checks([*jobs.SHARED, jobs.BIT_FOR_BIT], "srun", 2, env=slurm)
    failures = [failure for check in checks_in([*jobs.SHARED, jobs.BIT_FOR_BIT]) for failure in checks.failures(check)]
    assert not failures, "\n".join(failures)
    assert checks.outcome.code == 0, checks.outcome.output
    assert "Horovod over MPI, rank 0 of 2" in checks.outcome.output
    assert "component was not found" not in checks.outcome.output


@pytest.mark.needs("peers")
def test_metrics_datasets_and_collectives_see_all_ranks_under_srun(slurm: dict[str, str]) -> None:
    check_libraries("srun", env=slurm)


def test_srun_without_pmix_is_refused(slurm: dict[str, str]) -> None:
    outcome = run_job(
        "srun-without-pmix", 2, ["examples/mnist.py", "--dataset", "digits", "--device", "cpu"], env=slurm
    )
    assert outcome.code not in (0, 124)
    assert "start with `srun --mpi=pmix`" in outcome.output
    assert "Traceback" not in outcome.output


SAVES_AT_FIRST = """
import os, pathlib, sys
started = pathlib.Path("started-" + os.environ["SLURM_PROCID"])
started.open("a").write("x")
print("arguments:", sys.argv[1:], flush=True)
sys.exit({"x": 75, "xx": 139, "xxx": 0}[started.read_text()] if os.environ["SLURM_PROCID"] == "0" else 0)
"""


def state_of(job: str, env: dict[str, str]) -> str:
    """What Slurm says of a job, on one line."""
    done = subprocess.run(["scontrol", "-o", "show", "job", job], env=env, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("name", ["slurm.sbatch", pytest.param("slurm-torchrun.sbatch", marks=pytest.mark.slow)])
def test_a_job_goes_back_into_the_queue_until_it_is_done(tmp_path: Path, slurm: dict[str, str], name: str) -> None:
    (tmp_path / "train.py").write_text(SAVES_AT_FIRST)
    (tmp_path / "runs").mkdir()
    options = f"--parsable --ntasks-per-node=2 --overcommit --time=10 --job-name=again {ROOT}/jobs/{name}"
    outcome = in_shell(tmp_path, f"sbatch {options} python train.py --lr 0.1 'a b'", slurm)
    assert outcome.code == 0, outcome.output
    job, env = outcome.output.split()[-1], dict(os.environ, **slurm)
    end = r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)"
    wait_until(lambda: re.search(end, state_of(job, env)), 200, lambda: state_of(job, env))
    log = (tmp_path / f"runs/again-{job}.log").read_text()
    assert "JobState=COMPLETED" in state_of(job, env), log
    assert "Restarts=2 " in state_of(job, env)
    assert "TimeLimit=00:10:00 " in state_of(job, env)
    assert "exit code 75: back into the queue" in log
    assert log.count("back into the queue") == 2, log
    # Slurm keeps what the job was submitted with: the options, and the command with its arguments.
    for rank in range(2):
        said = (tmp_path / f"runs/again-{job}/rank-{rank}.log").read_text()
        assert said.splitlines() == ["arguments: ['--lr', '0.1', 'a b']"] * 3
