"""A dataclass of settings as options of a command line: names, types, defaults, help, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import trainer
from trainer import CheckpointConfig, ConfigError, FsdpConfig, TrainerConfig


@dataclass
class Inner:
    """What is within."""

    depth: int = 2
    """Layers, 100 % of them."""


@dataclass
class Settings:
    """Of every kind.

    And more than that.
    """

    ratio: float
    """Has no default."""
    name: str = "x"
    """Some text
    on two lines.

    A second paragraph, which is not help.
    """
    flag: bool = True
    """A flag."""
    maybe: bool | None = None
    mode: Literal["fast", "slow", 3] = "fast"
    """How to go."""
    color: Annotated[str, ("red", "none")] = "red"
    """the paint."""
    limit: int | float | None = 5
    """At most so many."""
    words: str | tuple[str, ...] = "all"
    """The words."""
    sizes: tuple[int, ...] = (1, 2)
    """Some sizes."""
    folder: Path = Path("there")
    """A folder."""
    inner: Inner = field(default_factory=lambda: Inner(depth=7))
    """Within."""
    made: int = field(default=0, init=False)


def parser(kind: type[Any] = Settings, **names: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="script", allow_abbrev=False)
    trainer.add_options(options, kind, **names)
    return options


def parse(*arguments: str) -> Settings:
    return trainer.from_options(Settings, parser().parse_args(["--ratio", "0.5", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("--ratio 2", "ratio", 2.0),
        ("--name none", "name", "none"),
        ("--no-flag", "flag", False),
        ("--maybe", "maybe", True),
        ("--no-maybe", "maybe", False),
        ("--mode slow", "mode", "slow"),
        ("--mode 3", "mode", 3),
        ("--color none", "color", "none"),
        ("--limit none", "limit", None),
        ("--limit 7", "limit", 7),
        ("--limit 7.5", "limit", 7.5),
        ("--words one,two", "words", ("one", "two")),
        ("--words all", "words", "all"),
        ("--words=", "words", ()),
        ("--sizes 3,4", "sizes", (3, 4)),
        ("--folder here", "folder", Path("here")),
        ("--inner-depth 1", "inner", Inner(depth=1)),
    ],
)
def test_an_option_sets_its_field_and_no_other(arguments: str, name: str, value: Any) -> None:
    expected = dataclasses.replace(Settings(ratio=0.5), **{name: value})
    settings = parse(*arguments.split())
    assert settings == expected
    assert type(getattr(settings, name)) is type(value)


def test_without_options_the_defaults_are_those_of_the_dataclass() -> None:
    assert parse() == Settings(ratio=0.5)
    plain = argparse.Namespace()
    assert trainer.from_options(TrainerConfig, plain) == TrainerConfig()
    assert trainer.from_options(TrainerConfig, parser(TrainerConfig).parse_args([])) == TrainerConfig()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--ratio much", "argument --ratio: 'much' is not valid; valid is a number"),
        ("--mode 4", "argument --mode: '4' is not valid; valid is fast or slow or 3"),
        ("--limit many", "argument --limit: 'many' is not valid; valid is none or a whole number or a number"),
        ("--sizes 1,b", "argument --sizes: 'b' is not valid; valid is a whole number"),
        ("--inner-depth 1.5", "argument --inner-depth: '1.5' is not valid; valid is a whole number"),
    ],
)
def test_a_value_of_another_type_is_a_line_that_names_what_is_valid(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"script: error: {line}"


def test_a_value_that_the_dataclass_refuses_is_its_own_error() -> None:
    parsed = parser(TrainerConfig).parse_args(["--precision", "half", "--batch-size", "0"])
    text = "precision is 'half'; valid are fp32, bf16, fp16; batch_size is 0; it must be at least 1"
    with pytest.raises(ConfigError, match=f"^{text}$"):
        trainer.from_options(TrainerConfig, parsed)


def test_a_field_without_a_default_has_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"^Settings needs ratio, and it is not given$"):
        trainer.from_options(Settings, parser().parse_args([]))
    with pytest.raises(ConfigError, match=r"^CheckpointConfig needs folder"):
        trainer.from_options(CheckpointConfig, argparse.Namespace())


def test_what_the_script_sets_itself_comes_before_the_options() -> None:
    parsed = parser().parse_args(["--name", "given"])
    assert trainer.from_options(Settings, parsed, ratio=1.0, name="mine") == Settings(ratio=1.0, name="mine")


def test_an_option_can_have_another_name_or_be_left_out() -> None:
    options = parser(CheckpointConfig, folder="--save-to", every_s=None)
    config = trainer.from_options(CheckpointConfig, options.parse_args(["--save-to", "there"]), every_s=5.0)
    assert config == CheckpointConfig(folder="there", every_s=5.0)
    for refused in ("--folder", "--every-s"):
        with pytest.raises(SystemExit):
            options.parse_args([refused, "1"])
    with pytest.raises(ConfigError, match=r"^Inner has no field 'deep'; valid are depth$"):
        parser(Inner, deep="--deep")


def test_fields_within_a_field_have_its_name_in_front() -> None:
    parsed = parser(TrainerConfig).parse_args(["--fsdp-blocks", "A,B", "--fsdp-shard-over", "2"])
    expected = FsdpConfig(blocks=("A", "B"), shard_over=2)
    assert trainer.from_options(TrainerConfig, parsed) == TrainerConfig(fsdp=expected)


def test_a_type_that_no_text_can_give_is_refused_unless_it_is_left_out() -> None:
    @dataclass
    class Odd:
        table: Any = None

    with pytest.raises(ConfigError, match=r"^table has the type typing\.Any, which a command line cannot give"):
        parser(Odd)
    assert trainer.from_options(Odd, parser(Odd, table=None).parse_args([])) == Odd()


def test_help_is_what_stands_under_the_fields() -> None:
    text = " ".join(parser().format_help().split())
    for entry in (
        "Settings: Of every kind. --ratio X Has no default. ",
        "--name NAME Some text on two lines. (default: x) ",
        "--flag, --no-flag A flag. (default: True) ",
        "--mode fast|slow|3 How to go. (default: fast) ",
        "--color red|none the paint. (default: red) ",
        "--limit N At most so many. (default: 5) ",
        "--words WORDS The words. (default: all) ",
        "--sizes SIZES Some sizes. (default: 1,2) ",
        "--folder FOLDER A folder. (default: there) ",
        "--inner-depth N Layers, 100 % of them. (default: 7)",
    ):
        assert entry in text
    assert "second paragraph" not in text
    assert "--made" not in text


def test_a_default_of_the_scripts_own_stands_in_the_help_as_well() -> None:
    own = parser(TrainerConfig)
    own.set_defaults(batch_size=50)
    assert trainer.from_options(TrainerConfig, own.parse_args([])) == TrainerConfig(batch_size=50)
    assert "`accumulate`. (default: 50)" in " ".join(own.format_help().split())


@pytest.mark.parametrize("kind", [TrainerConfig, CheckpointConfig])
def test_every_setting_of_the_library_is_explained(kind: type[Any]) -> None:
    actions = [action for action in parser(kind)._actions if action.dest != "help"]
    assert {name.name for name in dataclasses.fields(kind)} - {"fsdp"} <= {action.dest for action in actions}
    assert [action.dest for action in actions if not action.help or len(action.help.split()) < 4] == []


def test_it_serves_a_script_whose_source_is_not_there() -> None:
    script = (
        "import argparse, dataclasses, trainer\n"
        "Made = dataclasses.make_dataclass('Made', [('steps', int, 3)])\n"
        "parser = argparse.ArgumentParser(); trainer.add_options(parser, Made)\n"
        "print(trainer.from_options(Made, parser.parse_args(['--steps', '4'])))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "Made(steps=4)\n", done.stderr
