"""The installed horovodrun, as our patches change it: with a fake ssh, nothing leaves this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from horovod.runner import gloo_run
from horovod.runner.common.util import settings as hvd_settings
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.common.util.timeout import Timeout
from horovod.runner.util import closed, nested, output
from horovod.runner.util.login import LoginError, wait_for_hosts

from trainer.cluster.environment import read_launch
from trainer.cluster.launchers import LAUNCHERS
from trainer.errors import ConfigError

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
HOST = "far-away.invalid"
_PRIMARY = """Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted."""
_EXITED = """mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[41277,1],1]
  Exit code:    3"""
_NOTICED = "mpirun noticed that process rank 1 with PID 0 on node b exited on signal 9 (Killed)."
_UNNAMED = "a rank failed; mpirun did not say which one"
_WRITE_IN_PIECES = """
import os, sys
text, piece = sys.argv[1].encode(), int(sys.argv[2])
for start in range(0, len(text), piece):
    os.write(1, text[start : start + piece])
"""
SECRET = "not for other eyes"  # noqa: S105 (a token that the launcher must not show)
ANSWERS = {
    "refused": f"echo 'ssh: connect to host {HOST} port 2222: Connection refused' >&2; exit 255",
    "denied": f"echo 'me@{HOST}: Permission denied (publickey).' >&2; exit 255",
    "changed": "echo '@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @' >&2; "
    "echo 'Host key verification failed.' >&2; exit 255",
    # What a jump host refuses, ssh reports as if the connection had only been lost.
    "jump": "echo 'Host key verification failed.' >&2; echo 'Connection closed by UNKNOWN port 65535' >&2; exit 255",
    "hangs": "exec sleep 60",
    # Runs the command here. Options may stand behind the host, too.
    "works": 'while :; do case $1 in -o) shift 2;; far-*) shift;; *) break;; esac; done; exec sh -c "$*"',
    "not yet": f'[ $(wc -l < "$0.log") -ge 3 ] || {{ echo "ssh: connect to host {HOST} port 22: No route to host" >&2;'
    " exit 255; }",
}


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh first on the PATH that notes its arguments in ssh.log and behaves as `answer` says."""
    ssh = tmp_path / "ssh"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    answer(ssh, "works")
    return ssh


def answer(ssh: Path, name: str) -> None:
    ssh.write_text(f'#!/bin/sh\necho "$*" >> "$0.log"\n{ANSWERS[name]}\n')
    ssh.chmod(0o755)


def launch(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, HOROVODRUN, *args], capture_output=True, text=True, timeout=60)


def settings_with(timeout_s: int) -> hvd_settings.Settings:
    return hvd_settings.Settings(start_timeout=Timeout(timeout_s, "{activity}"), num_proc=1, hosts=f"{HOST}:1")


def why(timeout_s: int = 1) -> str:
    with pytest.raises(LoginError) as caught:
        wait_for_hosts([HOST], settings_with(timeout_s))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("denied", f"host {HOST} does not accept this node's key: me@{HOST}: Permission denied (publickey)."),
        ("changed", f"host {HOST} shows another host key than the pinned one, and is refused"),
        ("jump", f"host {HOST} shows a host key that is not known here, and is refused"),
    ],
)
def test_what_waiting_cannot_heal_is_said_at_once(fake_ssh: Path, name: str, line: str) -> None:
    answer(fake_ssh, name)
    assert why(timeout_s=30) == line
    assert len(fake_ssh.with_name("ssh.log").read_text().splitlines()) == 1


@pytest.mark.distributed
def test_a_refusing_host_is_waited_for_but_not_for_ever(fake_ssh: Path) -> None:
    answer(fake_ssh, "refused")
    assert why(timeout_s=2) == f"cannot log in to host {HOST}: connection refused on port 2222 (waited 2 s)"
    assert len(fake_ssh.with_name("ssh.log").read_text().splitlines()) == 3


@pytest.mark.distributed
def test_a_login_that_hangs_is_given_up(fake_ssh: Path) -> None:
    answer(fake_ssh, "hangs")
    assert "the login timed out after 2 s" in why(timeout_s=1)


@pytest.mark.distributed
def test_a_host_that_comes_up_is_taken(fake_ssh: Path) -> None:
    answer(fake_ssh, "not yet")
    wait_for_hosts([HOST], settings_with(20))
    assert len(fake_ssh.with_name("ssh.log").read_text().splitlines()) == 3


def test_host_keys_are_left_to_the_users_ssh_config(fake_ssh: Path) -> None:
    wait_for_hosts([HOST], settings_with(5))
    asked = fake_ssh.with_name("ssh.log").read_text()
    assert "StrictHostKeyChecking" not in asked
    assert "-o BatchMode=yes" in asked
    assert "-o ConnectTimeout=5" in asked


def test_unreachable_hosts_end_the_launcher_with_a_line_each(fake_ssh: Path) -> None:
    answer(fake_ssh, "changed")
    done = launch("--gloo", "-np", "1", "-H", "b.invalid:1,c.invalid:1", "true")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        *(
            f"horovodrun: host {name}.invalid shows another host key than the pinned one, and is refused"
            for name in "bc"
        ),
        "horovodrun: `trainer doctor -H b.invalid:1,c.invalid:1` looks for the cause on these hosts and between them",
    ]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("-np 4 -H a:1,b:1 true", "-np 4, but -H a:1,b:1 has 2 slots"),
        ("-np 1 -H a:x true", "-H a:x: hosts and their slots look like worker-0:2,worker-1:2"),
        ("-np 2 -H a:1,a:1 true", "-H a:1,a:1 names host a 2 times; once is valid, with all its slots"),
        ("-np 0 true", "-np 0: at least 1 is valid"),
        ("-np 3 -H localhost:2 --mpi-args=--nooversubscribe true", "-np 3, but -H localhost:2 has 2 slots"),
        ("--mpi -np 2 pyhton train.py", "there is no program pyhton on the PATH"),
        (
            f"-np 2 {__file__}",
            f"{__file__} is not a program; a script needs its interpreter, as in horovodrun -np 2 python {__file__}",
        ),
        ("-np 2", "no command is given; valid is, for example, horovodrun -np 2 python train.py"),
        ("-np 1 -hostfile /dev/null true", "hostfile /dev/null names no host; its lines look like worker-0 slots=2"),
    ],
)
def test_mistakes_are_one_line(args: str, line: str) -> None:
    done = launch(*args.split())
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"horovodrun: {line}\n")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("-np x true", "argument -np/--num-proc: 'x' is no whole number"),
        ("-np 1 --mpi --gloo true", "argument --gloo: not allowed with argument --mpi"),
        ("true", "the following arguments are required: -np/--num-proc"),
    ],
)
def test_mistakes_in_options_are_one_line(args: str, line: str) -> None:
    done = launch(*args.split())
    expected = f"horovodrun: {line}; horovodrun --help says what is valid\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ending", "exit_code", "line"),
    [("kill -KILL $$", 137, "was ended by signal 9 (Killed)"), ("exit 3", 3, "ended with exit code 3")],
)
def test_which_rank_failed_over_mpi_is_one_line(tmp_path: Path, ending: str, exit_code: int, line: str) -> None:
    script = "printf 'of \\377 a rank\\n' >&2\n[ $OMPI_COMM_WORLD_RANK = 1 ] && " + ending + "; exec sleep 30\n"
    (tmp_path / "rank.sh").write_text(script)
    command = [sys.executable, str(HOROVODRUN), "--mpi", "-np", "2", "sh", str(tmp_path / "rank.sh")]
    # In one job of eight, mpirun itself ends before it has written which rank it was.
    expected = rf"^horovodrun: (?:rank 1 (?:on \S+ )?{re.escape(line)}|{_UNNAMED})\n".encode()
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == exit_code
    assert done.stderr.count(b"of \xff a rank") == 2
    assert len(re.findall(expected, done.stderr, re.MULTILINE)) == 1, done.stderr
    assert b"-----" not in done.stderr


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ((_PRIMARY, _EXITED), "horovodrun: rank 1 ended with exit code 3\n"),
        ((_PRIMARY, _NOTICED), "horovodrun: rank 1 on b was ended by signal 9 (Killed)\n"),
        ((_PRIMARY,), f"horovodrun: {_UNNAMED}\n"),
        (("mpirun was unable to launch the specified application",), None),
    ],
)
@pytest.mark.parametrize("piece", [1, 50, 10_000])
def test_a_line_takes_the_place_of_what_mpirun_frames(
    capfd: pytest.CaptureFixture[str], frames: tuple[str, ...], told: str | None, piece: int
) -> None:
    written = "a rank's\n" + "".join(f"{'-' * 74}\n{frame}\n{'-' * 74}\n" for frame in frames)
    with subprocess.Popen(
        [sys.executable, "-c", _WRITE_IN_PIECES, written, str(piece)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        output.pass_on_without_frames(process.stdout, threading.Event())
    assert capfd.readouterr().err == (written if told is None else f"a rank's\n{told}")


@pytest.mark.parametrize("content", [b"\xffworker", b"\x00\x01\n"])
def test_a_hostfile_that_is_no_text_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hosts").write_bytes(content)
    done = launch("-np", "2", "-hostfile", str(tmp_path / "hosts"), "true")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"horovodrun: hostfile {tmp_path / 'hosts'}")


@pytest.mark.distributed
@pytest.mark.parametrize("option", ["--min-np 2", "--host-discovery-script=d.sh", "--slots-per-host 1"])
def test_elastic_jobs_are_refused(option: str) -> None:
    done = launch("-np", "2", *option.split(), "python", "train.py")
    name = re.split("[ =]", option)[0]
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"horovodrun: {closed.message(name)}\n")
    assert "`trainer run`" in done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import horovod.spark", "horovod.spark"),
        ("import horovod.torch as hvd; hvd.elastic.run", "horovod.torch.elastic"),
    ],
)
def test_what_loads_pickles_from_a_network_is_refused(code: str, name: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: {closed.message(name)}"


@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
def test_a_job_of_one_host_needs_no_ssh(controller: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sh", "bash", "env", "echo", "uname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = launch(controller, "-np", "2", "echo", "started")
    assert (done.returncode, done.stdout.count("started")) == (0, 2), done.stderr


def test_a_rank_behind_ssh_gets_the_environment_and_ssh_never_sees_it(
    fake_ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fake far side has a PATH of its own, which must not win.
    fake_ssh.write_text(fake_ssh.read_text().replace("exec sh", "PATH=/bin:/usr/bin exec sh"))
    settings = settings_with(5)
    slot = SlotInfo(hostname=HOST, rank=0, local_rank=0, cross_rank=0, size=1, local_size=1, cross_size=1)
    seen = tmp_path / "seen"
    monkeypatch.chdir(tmp_path)
    command = ["sh", "-c", f"echo $TOKEN $PATH $PWD $RANK > {seen}; ps axww > {seen}.ps; exit 7"]
    job = gloo_run.Job(settings, command, {"TOKEN": SECRET, "PATH": "/launcher:/usr/bin:/bin"})
    code, _ = gloo_run.run_rank(job, slot, {"RANK": "0"})
    assert code == 7
    assert seen.read_text() == f"{SECRET} /launcher:/usr/bin:/bin {tmp_path} 0\n"
    assert SECRET not in (tmp_path / "ssh.log").read_text() + (tmp_path / "seen.ps").read_text()


def test_a_local_job_keeps_the_environment_off_its_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    done = launch("--gloo", "-np", "1", "sh", "-c", 'echo "has $TOKEN"; ps axww')
    assert f"has {SECRET}" in done.stdout
    assert done.stdout.count(SECRET) == 1


@pytest.mark.distributed
@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
def test_a_file_that_is_imported_in_place_of_the_package_is_named(tmp_path: Path, controller: str) -> None:
    (tmp_path / "trainer.py").touch()
    (tmp_path / "train.py").write_text("import trainer\ntrainer.init()\n")
    done = launch(controller, "-np", "1", sys.executable, str(tmp_path / "train.py"))
    assert done.returncode != 0
    assert f"horovodrun: {tmp_path}/trainer.py is imported in place of the package trainer; rename it" in done.stderr
    (tmp_path / "trainer.py").unlink()
    done = launch(controller, "-np", "1", sys.executable, str(tmp_path / "none.py"))
    assert done.returncode != 0
    assert "in place of" not in done.stderr


def ranks_of(prefix: str, size: int) -> dict[str, str]:
    return {f"{prefix}{name}": value for name, value in
            {"RANK": "0", "SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_SIZE": str(size)}.items()}  # fmt: skip


ELSEWHERE = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"},
    "horovodrun": ranks_of("HOROVOD_", 2),
    "mpirun": ranks_of("OMPI_COMM_WORLD_", 2),
    "srun": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    "mpiexec": {"PMI_RANK": "0", "PMI_SIZE": "2"},
}


@pytest.mark.distributed
@pytest.mark.parametrize("outer", [*ELSEWHERE, "horovodrun after init"])
def test_a_rank_of_another_launcher_starts_no_job(outer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, _, init = outer.partition(" ")
    for name, value in (ELSEWHERE[outer] | (ELSEWHERE["torchrun"] if init else {})).items():
        monkeypatch.setenv(name, value)
    done = launch("--gloo", "-np", "1", "echo", "started")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"horovodrun: each of the 2 processes of {outer} calls horovodrun, and would train ")
    assert done.stderr.count("\n") == 1
    for name in done.stderr.partition(" env -u ")[2].split(" -u "):
        monkeypatch.delenv(name.strip())
    assert "started" in launch("--gloo", "-np", "1", "echo", "started").stdout


def test_horovodrun_and_the_library_know_the_same_launchers() -> None:
    rows = [launcher for launcher in LAUNCHERS.values() if launcher.variables]
    known = {row.name: (row.variables[1], row.variables[0], *row.variables[2:]) for row in rows}
    assert {**known, "mpiexec": ("PMI_SIZE", "PMI_RANK")} == nested.LAUNCHERS
    inside = {**ranks_of("HOROVOD_", 2), "HOROVOD_RANK": "1"}
    for outer in ("mpirun", "srun", "mpiexec"):
        with pytest.raises(ConfigError, match=f"^horovodrun with 2 and {outer} with 2 processes are nested"):
            read_launch({**ELSEWHERE[outer], **inside})
    with pytest.raises(ConfigError, match=r"^torchrun with 2 and horovodrun with 2 processes are nested"):
        read_launch({**ELSEWHERE["torchrun"], "TORCHELASTIC_RUN_ID": "7", **inside})


@pytest.mark.distributed
@pytest.mark.parametrize(
    "environment",
    [
        # The script of a batch job, an interactive step of salloc, one task of srun, and one rank of mpirun.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"},
        ranks_of("OMPI_COMM_WORLD_", 1),
        dict.fromkeys(name for names in ELSEWHERE.values() for name in names),
        # LSF without IBM's CSM.
        {"LSB_JOBID": "77", "LSB_HOSTS": "a a"},
    ],
    ids=["sbatch", "salloc", "mpirun", "empty", "LSF"],
)
def test_one_process_of_a_scheduler_starts_jobs(
    environment: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value or "")
    done = launch("--gloo", "-np", "1", "echo", "started")
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:started\n"), done.stderr
