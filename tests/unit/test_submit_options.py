"""The options of `trainer submit`: what is read, and what is refused."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.job_files import render
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.ops.submit.job import Job, shell_command
from trainer.ops.submit.options import to_options
from trainer.ops.submit.schedulers import SCHEDULERS
from trainer.ops.submit.secrets import secrets_in

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


@pytest.mark.parametrize(
    ("scheduler", "script", "name"),
    [
        ("jobset", "My_Train.py", "my-train"),
        ("mpijob", "3d/2_stage.v2.py", "job-2-stage-v2"),
        ("trainjob", "训练.py", "job"),
        ("jobset", f"{'a' * 39}_b.py", "a" * 39),
        ("slurm", "my script.py", "my-script"),
        ("pbs", "2 stages.py", "job-2-stages"),
        ("tione", f"{'a' * 99}.py", "a" * 60),
    ],
)
def test_a_name_that_the_scheduler_would_refuse_is_made_a_valid_one(scheduler: str, script: str, name: str) -> None:
    needs = [] if scheduler in ("slurm", "pbs") else ["--image", "a:1"]
    needs += ["--directive=InstanceType=a"] if scheduler == "tione" else []
    read = to_options([scheduler, "--nodes", "1", "--ranks-per-node", "1", *needs, "--", "python", script])
    assert read is not None
    assert read.job.name == name


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("horovodrun -np 4 python a/b.py", "horovodrun"),
        ("/usr/bin/mpirun -np 4 python a/b.py", "mpirun"),
        ("srun python a/b.py", "srun"),
        ("python -m torch.distributed.run a/b.py", "torch.distributed.run"),
        ("python venv/bin/torchrun a/b.py", "torchrun"),
        ("accelerate launch a/b.py", "accelerate"),
        ("deepspeed a/b.py", "deepspeed"),
        ("trainer run -np 2 python a/b.py", "trainer"),
        ("python -m trainer run -np 2 python a/b.py", "trainer"),
    ],
)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_launcher_in_the_job_is_refused(scheduler: str, command: str, launcher: str) -> None:
    problems = problems_of(scheduler, *SLURM[1:], "--", *shlex.split(command))
    said = (
        f"the command begins with {launcher}, but the job starts the ranks itself; give what one rank runs, as in -- "
    )
    assert f"{said}python a/b.py" in problems
    assert "\n" not in problems


def test_a_word_that_is_a_launchers_elsewhere_is_none() -> None:
    for command in ("python a.py torchrun", "python -m own.launcher --with srun", "./tool mpirun"):
        assert "starts the ranks itself" not in problems_of(*SLURM, "--bad", "--", *command.split())


def test_everything_that_is_wrong_is_said_at_once() -> None:
    problems = problems_of("slurm", "--nodes", "x", "--tme", "3", "--memory", "3", "--launcher", "mpirun", *COMMAND)
    for problem in (
        "no such option: --tme 3; did you mean --time? (valid are --array, ",
        "--nodes is 'x'; valid is a number of at least 1",
        "--ranks-per-node is missing",
        "--memory is '3'; valid is a number with GB",
        "slurm has srun, torchrun",
    ):
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
    words = (
        "A_TOKEN=1",
        "WANDB_API_KEY=1",
        "--hf-token",
        "x",
        "--db-password=x",
        "--api-key=x",
        "PASSWORD=y",
        "--wandb_api_key",
        "x",
        "--token=x",
        "--token",
        "logger.api_key=x",
        "hf_token=x",
    )
    assert secrets_in(job_with(*words)) == [
        "A_TOKEN",
        "WANDB_API_KEY",
        "--hf-token",
        "--db-password",
        "--api-key",
        "PASSWORD",
        "--wandb_api_key",
        "--token",
        "--token",
        "logger.api_key",
        "hf_token",
    ]
    problems = problems_of(*SLURM, "--", "env", "HF_TOKEN=hush", "python", "a.py")
    assert "the value of HF_TOKEN would be written" in problems
    assert "hush" not in problems


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--wandb-key abc", "--wandb-key"),
        ("--wandbKey abc", "--wandbKey"),
        ("+logger.wandb.key=abc", "+logger.wandb.key"),
        ("--password x", "--password"),
        ("-passphrase x", "-passphrase"),
        ("--apikey x", "--apikey"),
        ("--client-secret x", "--client-secret"),
        ("--authToken=x", "--authToken"),
        ("--aws-secret-access-key x", "--aws-secret-access-key"),
        ("--smtp-pass x", "--smtp-pass"),
        ("PGPASSWORD=x", "PGPASSWORD"),
        ("MYSQL_PWD=x", "MYSQL_PWD"),
        ("--env=HF_TOKEN=x", "HF_TOKEN"),
        ("--vendor-key 8f14e45fceea167a5a36dedd4bea2543", "--vendor-key"),
        ("--tracker https://user:pw@host/project", "a password in a URL"),
        ("--url=https://host/?token=abc", "token"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "an access token"),
    ],
)
def test_a_secret_is_known_by_its_name_or_its_look(words: str, name: str) -> None:
    assert secrets_in(job_with("python", "a.py", *words.split())) == [name]


def test_a_secret_in_the_words_of_a_shell_or_in_json_is_one_too() -> None:
    assert secrets_in(job_with("bash", "-c", "WANDB_API_KEY=x python a.py")) == ["WANDB_API_KEY"]
    assert secrets_in(job_with("--config", '{"api_key": "x", "sort_key": "y"}')) == ["api_key"]
    assert secrets_in(job_with("--header", "Authorization: Bearer x")) == ["Authorization"]


@pytest.mark.parametrize(
    "words",
    [
        "--pad-token <pad>",
        "--max-tokens=3",
        "token.py",
        "--key secret",
        "A=secret",
        "monkey=1",
        "pad_token=x",
        "sort_key=length",
        "HF_TOKEN",
        "--tokenizer gpt2",
        "--num-tokens 5",
        "--key-dim 64",
        "--keyframes 3",
        "--secret-file path",
        "--password-file=p",
        "--token-path p",
        "--eos-token-id 2",
        "--cache-key images",
        "--bypass",
        "--passes 2",
        "--second-pass 1",
        "--data https://host:80/a@b",
        "--data s3://bucket/key=1/x",
        "HF_TOKEN=$HF_TOKEN",
        "WANDB_API_KEY=",
        "--label-key label_of_the_image_2024_v2",
    ],
)
def test_an_ordinary_option_is_no_secret(words: str) -> None:
    assert secrets_in(job_with("python", "a.py", *words.split())) == []


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
