"""What is read of the command that starts a training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from trainer.ops.command import name_of, refuse_launcher, refuse_missing, to_command


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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train.py", "there is no command 'train.py' (did you mean python train.py?)"),
        ("pyhton train.py", "there is no command 'pyhton' (did you mean python?)"),
        ("python trian.py --lr 1", "there is no file 'trian.py' (did you mean train.py?)"),
        ("python -m no.such", "there is no module 'no'"),
        ("python -m pytest", ""),
        ("python -m train", ""),
        ("python -W ignore -bX dev train.py", ""),
        ("python - no.py", ""),
        ("env A=x python trian.py", ""),
    ],
)
def test_what_a_command_names_has_to_be_there(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert refuse_missing(command.split(), f"{Path(sys.executable).parent}:/usr/bin:/bin") == message
