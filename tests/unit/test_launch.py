"""`trainer.launch` without a launcher: what is refused, sent, printed, and made of the ranks' outcomes."""

from __future__ import annotations

import functools
import io
import linecache
import os
import pickle
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.errors import ConfigError, LaunchError
from trainer.ops.launch.keepers import Keepers
from trainer.ops.launch.launch import _dump_call
from trainer.ops.launch.outcome import CALL, Outcome, RankTracebackError, conclude, dumps, read_outcomes
from trainer.ops.launch.output import Tags
from trainer.ops.supervise.hosts import parse_hosts

LOCK = threading.Lock()
WHY = "rank 1 died without a word"
DONE, FAILED = (0, "done"), (1, WHY)


class TwoArgumentsError(Exception):
    """Cannot be made again from its text alone, as pickle does it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.second = second


class NoFileError(OSError):
    def __init__(self, *, path: str) -> None:
        super().__init__(2, "no file", path)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "within rank 1 of 2"),
        ({"TRAINER_JOB": "1f"}, "within a rank"),
    ],
)
def test_within_a_rank_it_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"trainer.launch is called {said}, and starts ranks itself") as refused:
        trainer.launch(print)
    assert "\n" not in str(refused.value)


def takes_two(first: int, second: int) -> int:
    return first + second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"np": 3, "hosts": "a:1,b:1"}, "np is 3, and hosts a:1,b:1 has 2 slots"),
        ({"launcher": "mpirun"}, "launcher is 'mpirun'; valid are horovodrun, mpi, gloo, torchrun"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0; valid is a number of at least 0"),
        # Of the function's arguments.
        (
            {"num_processes": 2},
            "takes_two(): got an unexpected keyword argument 'num_processes'; trainer.launch itself takes np, hosts, "
            "launcher, max_restarts, min_np, timeout_s",
        ),
    ],
)
def test_an_argument_that_is_not_valid_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer.launch(takes_two, 1, 2, **options)
    assert str(refused.value) == said


def test_without_horovod_the_launcher_that_is_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="horovodrun is not installed; the launcher torchrun comes with PyTorch"):
        trainer.launch(print)


def uses_a_global() -> bool:
    return LOCK.locked()


def _by_value(function: Callable[..., object]) -> Callable[..., object]:
    """Make a function one of `__main__`, which is sent with what it uses, as those of a notebook's cells are."""
    function.__module__ = "__main__"
    return function


@pytest.mark.parametrize(
    "arguments",
    [(print, LOCK), (print, {"model": [LOCK]}), (functools.partial(print, LOCK),), (_by_value(uses_a_global),)],
)
def test_what_cannot_be_sent_is_refused_in_one_line(arguments: Sequence[Any]) -> None:
    said = r"^trainer.launch cannot send .* or its arguments: .*_thread.lock"
    with pytest.raises(ConfigError, match=said) as refused:
        trainer.launch(*arguments)
    assert "\n" not in str(refused.value)


def call_rank(folder: Path, function: Callable[..., object], *args: object) -> subprocess.CompletedProcess[str]:
    """Run a function as the only rank of a job."""
    folder.mkdir()
    (folder / CALL).write_bytes(_dump_call(function, args, {}))
    return subprocess.run(
        [sys.executable, "-m", "trainer.ops.launch.rank", str(folder)],
        capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"TRAINER_SECRET": "1"},
    )  # fmt: skip


def outcomes_in(folder: Path) -> list[Outcome]:
    return [outcome for file in folder.glob("outcome-*") for outcome in read_outcomes(io.BytesIO(file.read_bytes()))]


def test_an_exception_comes_with_its_traceback_rank_and_host(tmp_path: Path) -> None:
    # As a cell of a notebook: its source is in no file.
    source = "def fail(value):\n    return 1 / value\n"
    linecache.cache["cell 7"] = (len(source), None, source.splitlines(keepends=True), "cell 7")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "cell 7", "exec"), names)  # noqa: S102 (the line above)
    done = call_rank(tmp_path / "a", names["fail"], 0)
    assert done.returncode == 1
    assert "return 1 / value" in done.stderr
    with pytest.raises(ZeroDivisionError, match="division by zero") as raised:
        conclude(*FAILED, outcomes_in(tmp_path / "a"))
    (note,) = raised.value.__notes__
    assert note.startswith("raised by rank 0 of 1 on host ")
    assert isinstance(raised.value.__cause__, RankTracebackError)
    trace = str(raised.value.__cause__)
    assert 'File "cell 7", line 2, in fail\n    return 1 / value' in trace
    assert "rank.py" not in trace
    del linecache.cache["cell 7"]


@pytest.mark.distributed
@pytest.mark.parametrize("error", [TwoArgumentsError("this", "that"), NoFileError(path="/a")])
def test_an_exception_of_a_class_with_its_own_arguments_is_raised(tmp_path: Path, error: Exception) -> None:
    def fail() -> None:
        raise error

    call_rank(tmp_path / "a", fail)
    with pytest.raises(type(error)) as raised:
        conclude(*FAILED, outcomes_in(tmp_path / "a"))
    assert str(raised.value) == str(error)
    assert vars(raised.value).items() >= vars(error).items()


def test_an_exception_that_cannot_be_sent_is_told(tmp_path: Path) -> None:
    def fail() -> None:
        error = TwoArgumentsError("this", "that")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    call_rank(tmp_path / "a", fail)
    with pytest.raises(LaunchError, match=r"rank 0 of 1 on host .*TwoArgumentsError: this that"):
        conclude(*FAILED, outcomes_in(tmp_path / "a"))


def test_a_function_that_ends_its_rank_is_told(tmp_path: Path) -> None:
    call_rank(tmp_path / "a", sys.exit, 3)
    with pytest.raises(LaunchError, match=r"^the function has called sys.exit\(3\)"):
        conclude(*FAILED, outcomes_in(tmp_path / "a"))


def test_a_result_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    done = call_rank(tmp_path / "a", _by_value(lambda: {"lock": __import__("threading").Lock()}))
    assert done.returncode == 1
    with pytest.raises(trainer.TrainerError, match=r"cannot send back the result of rank 0: .*_thread.lock"):
        conclude(*FAILED, outcomes_in(tmp_path / "a"))


def outcome(rank: int, value: object = None, **others: Any) -> Outcome:
    given: dict[str, Any] = {"rank": rank, "size": 2, "host": "a", "attempt": "1", "time": 1.0, "value": dumps(value)}
    return Outcome(**{**given, **others})


@pytest.mark.parametrize(("outcomes", "rank"), [([], 0), ([0], 1)])
def test_a_rank_without_a_result_is_named(outcomes: list[int], rank: int) -> None:
    with pytest.raises(LaunchError, match=f"rank {rank} has ended without a result"):
        conclude(*DONE, map(outcome, outcomes))


def test_only_the_last_attempt_counts_in_the_order_of_ranks() -> None:
    earlier = [outcome(rank, "old", attempt="0", time=0.5, size=3) for rank in range(3)]
    assert conclude(*DONE, [outcome(1, "b"), *earlier, outcome(0, "a")]) == ["a", "b"]
    with pytest.raises(LaunchError, match=WHY):
        conclude(*FAILED, [replace(earlier[1], trace="a bug"), outcome(0)])
    data = pickle.dumps(outcome(0)) + pickle.dumps(outcome(1))[:-5]  # of a host that was lost meanwhile
    assert [read.rank for read in read_outcomes(io.BytesIO(data))] == [0]


def test_the_rank_that_failed_first_is_told_and_not_one_that_lost_it() -> None:
    lost = outcome(0, RuntimeError("lost"), trace="t", follows=True, time=1.0)
    later = outcome(2, ValueError("later"), trace="t", time=3.0)
    with pytest.raises(KeyError, match="first"):
        conclude(*FAILED, [later, lost, outcome(1, KeyError("first"), trace="t", time=2.0)])
    with pytest.raises(LaunchError, match=WHY):
        conclude(*FAILED, [lost])


# Takes the place of ssh: what is in a folder "here" on this host is in a folder "there" on the other.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
[ "$1" = elsewhere ] || { echo "ssh: Could not resolve hostname $1" >&2; exit 255; }
shift
exec sh -c "$(echo "$*" | sed s:/here/:/there/:g)"
"""


@pytest.fixture
def other_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("bin", "here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "here"))
    return tmp_path / "there"


def keepers_of(hosts: str, tmp_path: Path) -> Keepers:
    keepers = Keepers(parse_hosts(hosts), "1f")
    keepers.folder = tmp_path / "here" / "launch"
    return keepers


def test_the_function_goes_to_other_hosts_and_outcomes_come_back(other_host: Path, tmp_path: Path) -> None:
    keepers, there = keepers_of("localhost:1,elsewhere:1", tmp_path), other_host / "launch"
    with keepers.keep(b"function"):
        assert (there / CALL).read_bytes() == (keepers.folder / CALL).read_bytes() == b"function"
        for folder in (there, keepers.folder):
            assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / CALL)] == [0o700, 0o600]
        (keepers.folder / "outcome-0").write_bytes(b"zero,")
        (there / "outcome-1").write_bytes(b"one")
        assert keepers.collect() == b"zero,one"
    assert not there.exists()
    assert not keepers.folder.exists()


def test_a_host_that_cannot_take_the_function_is_named(other_host: Path, tmp_path: Path) -> None:
    why = "cannot be sent to host nowhere: ssh: Could not resolve hostname"
    with (
        pytest.raises(trainer.TrainerError, match=why),
        keepers_of("elsewhere:1,nowhere:1", tmp_path).keep(b"function"),
    ):
        pass
    assert list(other_host.iterdir()) == []
    # A link that somebody has put there.
    (other_host / "launch").symlink_to(tmp_path / "bin")
    with (
        pytest.raises(trainer.TrainerError, match=r"cannot be sent to host elsewhere: mkdir: .* exists"),
        keepers_of("elsewhere:1", tmp_path).keep(b"function"),
    ):
        pass
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["ssh"]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"[1,0]<stdout>:one\n[1,0]<stdout>:two\n"], "[0] one\n[0] two\n"),
        ([b"[1,0]<std", b"out>:one\n[1", b",1]<stderr>:two\n"], "[0] one\n[1] two\n"),
        ([b"[1]<stdout>:over Gloo\n"], "[1] over Gloo\n"),
        # mpirun's mark stands before the piece, where a bar goes back to the line's beginning.
        ([b"[1,0]<stderr>:\r 10%", b"[1,0]<stderr>:\r 20%"], "\r[0]  10%\r[0]  20%"),
        ([b"[1,0]<stderr>:\r 100%[1,0]<stderr>:", b"\n[1,1]<stdout>:one\n"], "\r[0]  100%\n[1] one\n"),
        # horovodrun --gloo passes on whole lines.
        ([b"[0]<stderr>:\r", b"[0]<stderr>: 10%\r"], "[0] \r[0]  10%\r"),
        (["é".encode()[:1], "é".encode()[1:]], "é"),
        ([b"\xff and [12"], "\N{REPLACEMENT CHARACTER} and [12"),
    ],
)
def test_the_launchers_marks_become_a_rank_in_brackets(pieces: Sequence[bytes], shown: str) -> None:
    tags = Tags()
    assert "".join(map(tags.text, [*pieces, b""])) == shown
