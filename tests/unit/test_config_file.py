"""`--config job.toml`: options and command of `trainer run` from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pages import units
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.ops.supervise.options import Options, add_parser, make_parser, parse

FILE = """\
command = "python train.py --epochs 90"

[run]
np = 4
hosts = "a:2,b:2"
gloo = true
take-back = false
max-restarts = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(FILE)
    return path


def run_options(*arguments: str) -> Options:
    parser = add_parser(make_parser("trainer").add_subparsers())
    return parse(arguments, parser)


def test_run_takes_options_and_command_from_the_file(file: Path) -> None:
    options = run_options("--config", str(file))
    assert (options.ranks, options.launcher, options.max_restarts, options.take_back) == (4, "gloo", 3, False)
    assert [host.name for host in options.hosts] == ["a", "b"]
    assert options.command == ("python", "train.py", "--epochs", "90")


def test_the_command_line_has_the_last_word(file: Path) -> None:
    options = run_options("--config", str(file), "-np", "2", "--torchrun", "python", "other.py", "--config", "its.yaml")
    assert (options.ranks, options.launcher, options.max_restarts) == (2, "torchrun", 3)
    assert options.command == ("python", "other.py", "--config", "its.yaml")


def test_the_manuals_file_is_valid(file: Path) -> None:
    (block,) = units("toml")
    file.write_text(block.text)
    assert run_options("--config", str(file)).min_ranks == 2
    assert run_options("--config", str(file), "-np", "2", "-H", "localhost:2", "python", "train.py").ranks == 2


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("np = 4", 'np = "x"', "line 4: np is 'x'; valid is a number"),
        ("np = 4", "np = 0", "line 4: -np is 0; valid is a number of at least 1"),
        ("np = 4", "ranks = 4", "line 4: 'ranks' is not known; valid are gloo, hang-timeout, hosts, "),
        ("gloo = true", "gloo = 1", "line 6: gloo is 1; valid is true or false"),
        ("max-restarts = 3", "max-restarts = true", "line 8: max-restarts is True; valid is a number or a text"),
        ("max-restarts = 3", "max-restarts = -1", "line 8: --max-restarts is -1; valid is a number of at least 0"),
        ("np = 4", "np = [4, 2]", "line 4: np is [4, 2]; valid is a number or a text"),
        ("np = 4", "config = 'a'", "line 4: 'config' is not known; valid are "),
        ("[run]", "run = 3\n[other]", "line 3: run is 3; valid is a table, [run]"),
        (
            'epochs 90"',
            "epochs '90\"",
            'line 1: command is "python train.py --epochs \'90", which a shell cannot read: No cl',
        ),
        ("[run]", "[runs]", "line 3: 'runs' is not known; valid are command and [run]"),
        ('command = "python', 'command = 3 # "', "line 1: command is 3; valid is a text, or a list of texts"),
        ("np = 4", "np = four", "is not valid TOML: Invalid value (at line 4, column 6)"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file: Path, old: str, new: str, expected: str) -> None:
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError) as error:
        run_options("--config", str(file))
    assert str(file) in str(error.value)
    assert expected in str(error.value)


def test_a_mistake_on_the_command_line_is_not_the_files(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^-np is 0; valid is a number of at least 1$"):
        run_options("--config", str(file), "-np", "0")


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", str(tmp_path / "none.toml")]) == 2
    assert (
        capsys.readouterr().err
        == f"trainer run: --config {tmp_path}/none.toml cannot be read: No such file or directory\n"
    )
