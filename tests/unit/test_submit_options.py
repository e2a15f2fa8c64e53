"""The options of `trainer submit`: what is read, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.job_files import render
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.submit.job import Job, secrets_in, shell_command
from trainer.submit.options import to_options

SLURM = ["slurm", "--nodes", "2", "--ranks-per-node", "4"]
COMMAND = ["--", "python", "train.py"]


def job_of(*options: str) -> Job:
    read = to_options([*SLURM, *options, *COMMAND])
    assert read is not None
    return read.job


def problems_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        to_options(arguments)
    return str(error.value)


def test_units_are_read() -> None:
    job = job_of("--time", "2h", "--memory", "16GB", "--grace", "90s", "--cpus-per-rank", "3")
    assert (job.time_s, job.memory_gib, job.grace_s, job.cpus_per_rank) == (7200, 16, 90, 3)
    assert (job.ranks, job.cpus_per_node) == (8, 12)
    times = ("1d", "10m", "10min", "0:10:00", "12:30:05", "1-02:00:00")
    assert [job_of("--time", text).time_s for text in times] == [86400, 600, 600, 600, 45005, 93600]
    assert job_of("--time", "1h", "--grace", "0:05:00").grace_s == 300
    assert job_of("--memory", "1TiB").memory_gib == 1024


def test_defaults_leave_the_choice_to_the_scheduler() -> None:
    job = job_of()
    assert (job.name, job.launcher, job.grace_s, job.gpus_per_node) == ("train", "srun", 120, 0)
    assert (job.time_s, job.memory_gib, job.cpus_per_rank, job.image, job.array) == (None, None, None, "", "")


def test_the_job_is_named_after_its_script() -> None:
    for command, name in (
        (["python", "a/b.py", "-m", "seed=1,2"], "b"),
        (["python", "-m", "my.training"], "my.training"),
    ):
        read = to_options([*SLURM, "--", *command])
        assert read is not None
        assert read.job.name == name


def test_everything_that_is_wrong_is_said_at_once() -> None:
    problems = problems_of("slurm", "--nodes", "x", "--tme", "3", "--memory", "3", "--launcher", "mpirun", *COMMAND)
    for problem in (
        "no such option: --tme 3; did you mean --time? (valid are --array, ",
        "--nodes is 'x'; valid is a number of at least 1",
        "--ranks-per-node is missing", "--memory is '3'; valid is a number with GB", "slurm has srun, torchrun",
    ):  # fmt: skip
        assert problem in problems
    assert "\n" not in problems


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--time", "2M"], "--time is '2M'; valid is a number with s, m, min, h, d, as in 2h, or H:MM:SS"),
        (["--time", "10:00"], "--time is '10:00'"),
        (["--time", "1:99:00"], "--time is '1:99:00'"),
        (["--time", "0h"], "--time is '0h'"),
        (["--time", "3min"], "--time is 180 s, and --grace is 120 s; valid is a --time over 180 s"),
        (["--gpus-per-node", "2"], "--ranks-per-node is 4; each rank has one GPU: valid is --ranks-per-node 2"),
        (["--array", "0-3"], "--array and {index} in the command go together"),
        (["--array", "3-x"], "--array is '3-x'; valid are numbers as in 0-3,7"),
        (["--name", "a b"], "--name is 'a b'"),
        (["--name", "../a"], "--name is '../a'"),
        (["--directive", "partition"], "--directive is 'partition'; valid is an option of sbatch's"),
        (["--directive=--output=a"], "--directive is '--output=a'; valid is an option of sbatch's"),
        (["--directive=--job x"], "but not --job-name, --array, --chdir, --output, by which the logs are found"),
        (["--directive=-Da"], "--directive is '-Da'"),
        (["--directive=--comment=a\nscancel"], "not printable"),
        (["--directive", "--partition=gpu"], "--directive takes its text behind =, as in --directive=--partition=gpu"),
        (["--nodes"], "--nodes: expected one argument"),
        (["--frobnicate"], "no such option: --frobnicate (valid are"),
        (["extra"], "extra is no option"),
        (["--grace", "0:00:00"], "--grace is '0:00:00'"),
    ],
)
def test_a_value_that_is_not_valid_is_refused(options: list[str], problem: str) -> None:
    assert problem in problems_of(*SLURM, *options, *COMMAND)


def test_an_index_without_an_array_is_refused() -> None:
    assert "--array and {index}" in problems_of(*SLURM, "--", "python", "a.py", "--seed", "{index}")


def test_an_unknown_scheduler_is_answered_with_those_that_there_are() -> None:
    assert "scheduler 'slrm' is not known; valid are slurm" in problems_of("slrm", *COMMAND)
    assert "SCHEDULER is missing; valid are slurm" in problems_of()


def test_a_command_is_asked_for() -> None:
    assert "there is no command; put it behind --" in problems_of(*SLURM)
    assert problems_of(*SLURM, "python", "train.py") == (
        "python train.py is no option; the command goes behind --, as in -- python train.py"
    )
    both = problems_of(*SLURM, "--tme", "3")
    assert "no such option: --tme 3" in both
    assert "there is no command" in both


def test_a_secret_does_not_get_into_a_file() -> None:
    words = ("A_TOKEN=1", "WANDB_API_KEY=1", "--hf-token", "x", "--db-password=x", "--api-key=x", "PASSWORD=y",
             "--wandb_api_key", "x", "--token=x", "--token", "logger.api_key=x", "hf_token=x")  # fmt: skip
    assert secrets_in(job_with(*words)) == [
        "A_TOKEN", "WANDB_API_KEY", "--hf-token", "--db-password", "--api-key", "PASSWORD", "--wandb_api_key",
        "--token", "--token", "logger.api_key", "hf_token",
    ]  # fmt: skip
    harmless = ("--pad-token", "<pad>", "--max-tokens=3", "token.py", "--key", "A=secret", "monkey=1", "pad_token=x",
                "sort_key=length", "HF_TOKEN")  # fmt: skip
    assert secrets_in(job_with(*harmless)) == []
    problems = problems_of(*SLURM, "--", "env", "HF_TOKEN=hush", "python", "a.py")
    assert "the value of HF_TOKEN would be written" in problems
    assert "hush" not in problems


def job_with(*words: str) -> Job:
    return replace(job_of(), command=words)


@pytest.mark.parametrize("directive", ["--export=HF_TOKEN=hush", "--export=ALL,HF_TOKEN=hush", "-v HF_TOKEN=hush"])
def test_a_secret_in_a_directive_does_not_either(directive: str) -> None:
    problems = problems_of(*SLURM, f"--directive={directive}", *COMMAND)
    assert "the value of HF_TOKEN would be written" in problems
    assert "hush" not in problems


def test_words_are_quoted_for_the_shell() -> None:
    assert shell_command(("a", "b c", "$(d)", "e'f")) == """a 'b c' '$(d)' 'e'"'"'f'"""
    assert shell_command(("--seed={index}", "{index}"), "$I") == """--seed="$I" "$I\""""


def test_the_environment_stays_out_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "hush-hush")
    assert "hush-hush" not in render(*SLURM, *COMMAND)


def test_help_has_examples_and_the_schedulers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  trainer submit slurm --nodes 2 --ranks-per-node 2 --time 2h -- python train.py" in shown
    assert "  slurm      Slurm" in shown
    examples = shown[shown.index("examples:") : shown.index("exit codes:")].replace("\\\n", "").split("  trainer ")[1:]
    assert len(examples) > 3
    assert all("--checkpoint runs/checkpoints" in example for example in examples)


def test_a_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_where_the_scheduler_is_not_installed_a_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "train.py").touch()
    assert main(["submit", *SLURM, *COMMAND]) == 2
    assert "sbatch is not installed here" in capsys.readouterr().err
