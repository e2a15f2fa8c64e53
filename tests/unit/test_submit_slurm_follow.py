"""What `trainer submit` says to Slurm and reads from it: states, logs, refusals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.unit.job_files import render, stand_in
from trainer.cli import main
from trainer.ops.submit.schedulers import SCHEDULERS, State

SLURM = ["slurm", "--nodes", "2", "--ranks-per-node", "2"]
COMMAND = ["--", "python", "train.py", "--checkpoint", "runs/a b"]
RECORD = "JobId={id} JobName=train UserId=a(1) Priority=1 JobState={state} Reason={reason} ExitCode={code}"


def record(id: int, state: str, code: str, reason: str = "None") -> str:
    return RECORD.format(id=id, state=state, code=code, reason=reason)


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with programs that stand in for Slurm's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize(
    ("states", "name", "code"),
    [
        ([("RUNNING", "0:0")], "RUNNING", None),
        ([("PENDING", "0:0")], "PENDING", None),
        ([("PENDING", "0:0", "Resources")], "PENDING (Resources)", None),
        ([("COMPLETED", "0:0")], "COMPLETED", 0),
        ([("FAILED", "78:0", "NonZeroExitCode")], "FAILED (exit code 78)", 78),
        ([("FAILED", "3:0")], "FAILED (exit code 3)", 1),
        ([("CANCELLED", "0:15")], "CANCELLED (signal 15)", 1),
        ([("TIMEOUT", "0:0", "TimeLimit")], "TIMEOUT", 1),
        ([("COMPLETED", "0:0"), ("RUNNING", "0:0")], "RUNNING", None),
        ([("COMPLETED", "0:0"), ("FAILED", "1:0")], "FAILED (exit code 1)", 1),
    ],
)
def test_slurms_states_are_read(tmp_path: Path, states: list[tuple[str, ...]], name: str, code: int | None) -> None:
    lines = [record(17 + number, *words) for number, words in enumerate(states)]
    stand_in(tmp_path, "scontrol", "\n".join(f"echo '{line}'" for line in lines))
    state = SCHEDULERS["slurm"].state("17", {})
    assert (str(state), state.code) == (name, code)


def test_the_end_of_an_arrays_job_is_remembered(tmp_path: Path) -> None:
    known: dict[str, State] = {}
    answers = [
        ([(17, "RUNNING", "0:0"), (19, "FAILED", "3:0")], None),
        ([(17, "FAILED", "1:0"), (19, "RUNNING", "0:0")], None),  # 19 was put back by hand
        ([(17, "RUNNING", "0:0"), (19, "FAILED", "3:0")], None),
        ([(17, "COMPLETED", "0:0")], 1),
    ]
    for records, code in answers:
        lines = [record(number, state, code) for number, state, code in records]
        stand_in(tmp_path, "scontrol", "\n".join(f"echo '{line}'" for line in lines))
        assert SCHEDULERS["slurm"].state("17", known).code == code


def test_a_job_is_submitted_and_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, "sbatch", 'cp "${@: -1}" submitted; mkdir -p runs/train-17; echo "17;cluster"')
    state = f'echo "{record(17, "$state", "78:0")}"'
    stand_in(
        tmp_path,
        "scontrol",
        f"""
        if [ -e once ]; then state=FAILED; echo second >> runs/train-17/rank-0.log; else state=RUNNING; fi
        [ -e once ] || printf 'first\\nhalf a line, ' > runs/train-17/rank-0.log
        touch once; {state}""",
    )
    assert main(["submit", *SLURM, "--follow", *COMMAND]) == 78
    shown = capsys.readouterr()
    assert shown.out == "[rank 0] first\n[rank 0] half a line, second\n"
    assert shown.err.replace("trainer submit: ", "").splitlines() == [
        "runs/train.sbatch is job 17; scancel 17 ends it",
        "its output: runs/train-17.log, runs/train-17/",
        "job 17: RUNNING",
        "job 17: FAILED (exit code 78); its output: runs/train-17.log, runs/train-17/",
    ]
    assert (tmp_path / "submitted").read_text() == render(*SLURM, "--follow", *COMMAND)


def test_a_state_is_told_once_and_a_line_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.ops.submit.submit._POLL_S", 0.01)
    stand_in(tmp_path, "sbatch", "mkdir -p runs/train-17; echo 17")
    state = f'echo "{record(17, "$state", "0:0")}"'
    stand_in(
        tmp_path, "scontrol", f"echo >> asked; state=RUNNING; [ $(wc -l < asked) -lt 4 ] || state=COMPLETED; {state}"
    )
    (tmp_path / "runs/train-17").mkdir(parents=True)
    (tmp_path / "runs/train-17/rank-10.log").write_text("last\nnot whole")
    (tmp_path / "runs/train-17/rank-2.log").write_text("first\n")
    assert main(["submit", *SLURM, "--follow", *COMMAND]) == 0
    shown = capsys.readouterr()
    assert shown.out == "[rank 2] first\n[rank 10] last\n"
    assert shown.err.count("RUNNING") == 1


def test_what_the_ranks_say_of_a_failure_stands_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, "sbatch", "mkdir -p runs/train-17; echo 17")
    stand_in(tmp_path, "scontrol", f"echo '{record(17, 'FAILED', '1:0')}'")
    (tmp_path / "runs/train-17").mkdir(parents=True)
    lost = "".join(f"trainer: rank {rank} on host b: lost another rank, and with it the job (X)\n" for rank in range(9))
    (tmp_path / "runs/train-17.log").write_text(
        "trainer: ring on 4 ranks\ntrainer: rank 1 on host b: ValueError: a\n"
        f"trainer: why it failed: rank 1 on b called all_reduce\n{lost}" + "a box of the launcher's\n" * 20
    )
    assert main(["submit", *SLURM, "--follow", *COMMAND]) == 1
    assert [line for line in capsys.readouterr().err.splitlines() if " said: " in line] == [
        "trainer submit: job 17 said: trainer: rank 1 on host b: ValueError: a",
        "trainer submit: job 17 said: trainer: why it failed: rank 1 on b called all_reduce",
    ]


def test_the_reason_of_an_earlier_start_is_not_told_of_a_later_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.ops.submit.submit._POLL_S", 0.01)
    stand_in(
        tmp_path, "sbatch", "mkdir -p runs/train-17; echo 'trainer: rank 1 on host b: x' > runs/train-17.log; echo 17"
    )
    states = "echo >> asked; states=(RUNNING RUNNING PENDING RUNNING CANCELLED); state=${states[$(wc -l < asked) - 1]}"
    stand_in(tmp_path, "scontrol", f'{states}; echo "{record(17, "$state", "0:15")}"')
    assert main(["submit", *SLURM, "--follow", *COMMAND]) == 1
    shown = capsys.readouterr()
    assert "rank 1 on host b: x" in shown.out
    assert " said: " not in shown.err


def test_the_lines_of_an_arrays_jobs_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, "sbatch", "echo 17")
    stand_in(tmp_path, "scontrol", "\n".join(f"echo '{record(job, 'COMPLETED', '0:0')}'" for job in (17, 18)))
    for job in (17, 18):
        (tmp_path / f"runs/train-{job}").mkdir(parents=True)
        (tmp_path / f"runs/train-{job}.log").write_text("begins\n")
        (tmp_path / f"runs/train-{job}/rank-3.log").write_text("trains\n")
    assert main(["submit", *SLURM, "--follow", "--array", "0-1", *COMMAND, "{index}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[job 17] begins",
        "[job 17, rank 3] trains",
        "[job 18] begins",
        "[job 18, rank 3] trains",
    ]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("python trian.py", "trian.py"),
        ("python -u a/train.py", "a/train.py"),
        ("python3.11 -W ignore -X dev -u nope.py train.py", "nope.py"),
        ("./train2.py", "./train2.py"),
        ("./nope.sh train.py", "./nope.sh"),
    ],
)
def test_a_script_that_is_not_there_is_not_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, missing: str
) -> None:
    refused = f"{Path(missing)} is not a file in {tmp_path}, the folder in which the job will run"
    check_refusal(tmp_path, capsys, command.split(), refused)


def check_refusal(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], refused: str, *options: str
) -> None:
    stand_in(folder, "sbatch", "touch submitted; echo 17")
    assert main(["submit", *SLURM, *options, "--", *command]) == 2
    assert capsys.readouterr().err == f"trainer submit: {refused}\n"
    assert not (folder / "submitted").exists()
    assert not (folder / "runs").exists()


def test_a_file_that_may_not_be_executed_is_not_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = "train.py may not be executed; call chmod +x train.py, or begin with python"
    check_refusal(tmp_path, capsys, ["./train.py"], refused)


def test_a_module_that_this_python_does_not_have_is_not_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    refused = f"there is no module missing.part, neither in this environment nor in {tmp_path}"
    check_refusal(tmp_path, capsys, ["python", "-um", "missing.part"], refused)
    (tmp_path / "own").mkdir()
    for words in (
        ["python", "-m", "own.part"],
        ["python", "-m", "json.tool"],
        ["env", "PYTHONPATH=src", "python", "-mx"],
    ):
        assert main(["submit", *SLURM, "--", *words]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--", "/opt/python", "-m", "a.py"],
        ["--", "python", "train.py", "a.py"],
        ["--", "env", "-C", "a", "python", "a.py"],
        ["--image", "a.sif", "--", "python", "/opt/a.py"],
        ["--dry-run", "--", "python", "a.py"],
        ["--", "mytool", "out.py"],
        ["--", "/in_container.sh", "a.py"],
        ["--", "bash", "-c", "cd a; python a.py"],
        ["--", "uv", "run", "a.py"],
        ["--image", "a.sif", "--", "python", "-mfoo", "a.py"],
    ],
)
def test_a_script_that_may_be_elsewhere_is_not_looked_for(tmp_path: Path, words: list[str]) -> None:
    stand_in(tmp_path, "sbatch", "echo 17")
    assert main(["submit", *SLURM, *words]) == 0


def test_a_job_that_slurm_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, "sbatch", "printf 'sbatch: error: no\\nsuch partition\\n' >&2; exit 1")
    assert main(["submit", *SLURM, *COMMAND]) == 1
    assert capsys.readouterr().err == "trainer submit: sbatch refuses: sbatch: error: no such partition\n"
