"""The command line of `trainer run`: what it takes, and one line for what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import get_parser, main
from trainer.errors import ConfigError
from trainer.ops.supervise.hosts import Host, parse_hosts
from trainer.ops.supervise.options import Options, to_options, with_file


def parse(*arguments: str) -> Options:
    return to_options(get_parser().parse_args(["run", *arguments]))


def test_what_stands_behind_the_command_is_its_own() -> None:
    command = ("python", "train.py", "-np", "7", "--help")
    options = parse("-np", "4", "-H", "a:2,b:2", "--min-np", "2", *command)
    hosts = (Host("a", 2), Host("b", 2))
    assert options == Options(np=4, hosts=hosts, min_np=2, name="train", command=command)


def test_hosts_and_the_least_number_of_ranks_follow_from_np() -> None:
    options = parse("-np", "3", "--torchrun", "python", "-m", "my.training")
    assert (options.hosts, options.min_np) == ((Host("localhost", 3),), 3)
    assert (options.launcher, options.name) == ("torchrun", "my.training")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("x", "-np is missing; valid is a number of at least 1"),
        ("-np 0 x", "-np is 0; valid is a number of at least 1"),
        ("-np 3 -H a:2 x", "-np is 3, and -H a:2 has 2 slots"),
        ("-np 2 --min-np 3 x", "--min-np is 3; valid is 1 to 2, which -np is"),
        ("-np 2 --hang-timeout -3 x", "--hang-timeout is -3.0; valid is a number of at least 0"),
        ("-np 2 --timeout -1 x", "--timeout is -1.0; valid is a number of at least 0"),
        ("-np 2 --wait-for-hosts nan x", "--wait-for-hosts is nan"),
        ("-np 2 --max-restarts -1 x", "--max-restarts is -1"),
        ("-np 2", "there is no command to start"),
        ("-np 2 no-such-command", "there is no command 'no-such-command'"),
        ("-np 2 --name ../x x", "--name is '../x'"),
        (
            "-np 2 -- horovodrun -np 2 python a.py",
            "the command begins with horovodrun, but trainer run starts the ranks itself; give what one rank runs",
        ),
        ("-np 2 python -um torch.distributed.run a.py", "the command begins with torch.distributed.run"),
        ("-np 2 --frobnicate x", "no such option: --frobnicate; see trainer run --help"),
        ("--np 2 x", "no such option: --np (did you mean -np?); see trainer run --help"),
        ("--min-pn=2 x", "no such option: --min-pn=2 (did you mean --min-np?); see trainer run --help"),
        ("-np 2 --name=-- x", "argument --name: '--' is no value; see trainer run --help"),
        ("-np two x", "argument -np: invalid int value: 'two'"),
        ("-np 2 --mpi --gloo x", "argument --gloo: not allowed with argument --mpi"),
    ],
)
def test_what_is_not_valid_is_named_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["run", *words.split()])
    except SystemExit as ended:
        code = int(str(ended.code))
    printed = capsys.readouterr().err
    assert code == 2
    assert printed.startswith(f"trainer run: {message}")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rnu", "there is no command 'rnu' (did you mean run?)"),
        ("--hlep", "there is no command '--hlep' (did you mean --help?)"),
        ("-np 2 x", "there is no command '-np'; valid are run, doctor, requeue, env, merge"),
    ],
)
def test_a_mistyped_subcommand_is_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert capsys.readouterr().err == f"trainer: {message}; see trainer --help\n"


@pytest.mark.parametrize("words", ["", "help", "help run", "help doctor", "help requeue", "help env", "help merge"])
def test_help_fits_on_a_terminal(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(words.split())
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: trainer {words.removeprefix('help').strip()}")
    assert max(map(len, printed.splitlines())) <= 80


def test_a_mistyped_command_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-np", "2", "python", "trian.py"]) == 2
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("words", [["run", "-np", "1", "-H", "", "x"], ["doctor", "-H", ""]])
def test_no_hosts_at_all_are_not_this_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "-H has ''; valid is HOST:SLOTS" in capsys.readouterr().err


def test_a_file_of_options_is_split_as_by_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.txt"
    file.write_text("-H a:2,b:2 --gloo  # two hosts\n--name 'my job'\n")
    words = with_file(["run", f"@{file}", "-np", "2", "python", "train.py", f"@{file}"])
    assert words == ["run", "-H", "a:2,b:2", "--gloo", "--name", "my job", "-np", "2", "python", "train.py", f"@{file}"]
    with pytest.raises(SystemExit, match="2"):
        with_file(["run", "@nowhere", "python"])
    assert capsys.readouterr().err == "trainer run: @nowhere: No such file or directory\n"


def test_hosts_are_read_as_horovodrun_reads_them() -> None:
    assert parse_hosts("a:2,b.example.org:16,c") == (Host("a", 2), Host("b.example.org", 16), Host("c", 1))


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:-1", "a:2,", "a:2,a:1", "-oProxyCommand=x:1", "a b:1", "a:²"])
def test_hosts_that_are_not_valid_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="-H has"):
        parse_hosts(text)
