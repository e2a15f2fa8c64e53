"""What `trainer submit` says to Slurm and reads from it: states, logs, refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.job_files import render, stand_in
from trainer.cli import main
from trainer.submit.schedulers import SCHEDULERS, Watch

SLURM = ["slurm", "--nodes", "2", "--ranks-per-node", "2"]
COMMAND = ["--", "python", "train.py", "--checkpoint", "runs/a b"]
RECORD = "JobId={id} JobName=train UserId=a(1) Priority=1 JobState={state} Reason=None ExitCode={code}"


@pytest.mark.parametrize(
    ("states", "name", "code"),
    [
        ([("RUNNING", "0:0")], "RUNNING", None),
        ([("PENDING", "0:0")], "PENDING", None),
        ([("COMPLETED", "0:0")], "COMPLETED", 0),
        ([("FAILED", "78:0")], "FAILED", 78),
        ([("FAILED", "3:0")], "FAILED", 1),
        ([("CANCELLED", "0:15")], "CANCELLED", 1),
        ([("COMPLETED", "0:0"), ("RUNNING", "0:0")], "RUNNING", None),
        ([("COMPLETED", "0:0"), ("FAILED", "1:0")], "FAILED", 1),
    ],
)
def test_slurms_states_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[tuple[str, str]], name: str, code: int | None
) -> None:
    lines = [RECORD.format(id=17 + number, state=state, code=code) for number, (state, code) in enumerate(states)]
    stand_in(tmp_path, "scontrol", "\n".join(f"echo '{line}'" for line in lines))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    state = Watch(SCHEDULERS["slurm"], "17").state()
    assert (state.name, state.code) == (name, code)


def test_the_end_of_an_arrays_job_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    watch = Watch(SCHEDULERS["slurm"], "17")
    answers = [
        ([(17, "RUNNING", "0:0"), (19, "FAILED", "3:0")], None),
        ([(17, "FAILED", "1:0"), (19, "RUNNING", "0:0")], None),  # 19 was put back by hand
        ([(17, "RUNNING", "0:0"), (19, "FAILED", "3:0")], None),
        ([(17, "COMPLETED", "0:0")], 1),
    ]
    for records, code in answers:
        lines = [RECORD.format(id=number, state=state, code=code) for number, state, code in records]
        stand_in(tmp_path, "scontrol", "\n".join(f"echo '{line}'" for line in lines))
        assert watch.state().code == code


def test_a_job_is_submitted_and_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, "sbatch", 'cp "${@: -1}" submitted; mkdir -p runs/train-17; echo "17;cluster"')
    state = f"echo '{RECORD.format(id=17, state='$state', code='78:0')}'".replace("'", '"')
    stand_in(
        tmp_path,
        "scontrol",
        f"""
        if [ -e once ]; then state=FAILED; echo second >> runs/train-17/rank-0.log; else state=RUNNING; fi
        [ -e once ] || printf 'first\\nhalf a line, ' > runs/train-17/rank-0.log
        touch once; {state}""",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", *SLURM, "--follow", *COMMAND]) == 78
    shown = capsys.readouterr()
    assert shown.out == "first\nhalf a line, second\n"
    assert "runs/train.sbatch is job 17; scancel 17 ends it" in shown.err
    assert "job 17: RUNNING" in shown.err
    assert "job 17: FAILED" in shown.err
    assert (tmp_path / "submitted").read_text() == render(*SLURM, "--follow", *COMMAND)


def test_a_state_is_told_once_and_a_line_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.submit.submit._POLL_S", 0.01)
    stand_in(tmp_path, "sbatch", "mkdir -p runs/train-17; echo 17")
    state = f'echo "{RECORD.format(id=17, state="$state", code="0:0")}"'
    stand_in(
        tmp_path, "scontrol", f"echo >> asked; state=RUNNING; [ $(wc -l < asked) -lt 4 ] || state=COMPLETED; {state}"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/train-17").mkdir(parents=True)
    (tmp_path / "runs/train-17/rank-10.log").write_text("last\nnot whole")
    (tmp_path / "runs/train-17/rank-2.log").write_text("first\n")
    assert main(["submit", *SLURM, "--follow", *COMMAND]) == 0
    shown = capsys.readouterr()
    assert shown.out == "first\nlast\n"
    assert shown.err.count("RUNNING") == 1


def test_a_job_that_slurm_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, "sbatch", "printf 'sbatch: error: no\\nsuch partition\\n' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", *SLURM, *COMMAND]) == 1
    assert capsys.readouterr().err == "trainer submit: sbatch refuses: sbatch: error: no such partition\n"
