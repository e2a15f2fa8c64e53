"""What is read of the command that starts a training."""

from __future__ import annotations

import shlex

import pytest

from trainer.ops.command import name_of, refuse_launcher, to_command


def test_a_job_is_named_after_its_script() -> None:
    assert name_of(["python", "a/b.py", "-m", "seed=1,2"]) == "b"
    assert name_of(["python", "-m", "my.training"]) == "my.training"


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("horovodrun -np 4 python a/b.py", "horovodrun"),
        ("/usr/bin/mpirun -np 4 python a/b.py", "mpirun"),
        ("srun python a/b.py", "srun"),
        ("python -um torch.distributed.run a/b.py", "torch.distributed.run"),
        ("python -W ignore venv/bin/torchrun a/b.py", "torchrun"),
        ("accelerate launch a/b.py", "accelerate"),
        ("trainer run -np 2 python a/b.py", "trainer"),
    ],
)
def test_a_launcher_in_the_command_is_refused(command: str, launcher: str) -> None:
    assert refuse_launcher(to_command(shlex.split(command)), "trainer run") == (
        f"the command begins with {launcher}, but trainer run starts the ranks itself; give what one rank runs, "
        "as in -- python a/b.py"
    )


def test_a_word_that_is_a_launchers_elsewhere_is_none() -> None:
    for command in ("python a.py torchrun", "python -m own.launcher --with srun", "./tool mpirun"):
        assert refuse_launcher(to_command(command.split()), "trainer run") == ""
