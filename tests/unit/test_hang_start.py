"""The start of the watch: what fails ends no job, one watcher is started on a host, and it can be switched off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.watch import heartbeat
from trainer.watch import start as hang
from trainer.watch.start import Entry, hang_timeout_s, start_limit_s

OTHER = Entry(40.0, "b boot ns", "/proc/1/fd/1")
"""What a rank of another host tells."""

Started = list[tuple[list[str], dict[str, Any]]]


def world(rank: int) -> World:
    return World(rank=rank, size=4)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """The commands of the watchers that are started, and their options."""
    seen = Started()
    monkeypatch.setattr(
        "trainer.watch.start.subprocess.Popen", lambda command, **options: seen.append((command, options))
    )
    yield seen
    heartbeat._forget()


def described(given_s: float | None = None) -> Entry:
    entry = hang.describe(world(1), given_s)
    assert entry is not None
    return entry


def test_the_first_rank_of_a_host_that_can_be_watched_starts_a_watcher(started: Started) -> None:
    here = described()
    assert here.host.endswith(f" {Path('/proc/self/ns/pid').readlink()}")
    entries = [OTHER, Entry(None), here, here]
    for rank in (1, 3):
        hang.start(world(rank), entries, None)
    assert started == []
    hang.start(world(2), entries, None)
    ((command, options),) = started
    assert command[-3:-1] == ["-m", "trainer.ops.watcher"]
    settings = json.loads(command[-1])
    assert (settings["host"], settings["size"]) == (here.host.split()[0], 4)
    assert settings["records"] == {"2": here.record, "3": here.record}
    assert (settings["given_s"], settings["start_s"]) == (40.0, 1800.0), "rank 0's"
    assert options["start_new_session"] is True
    assert Path(options["env"]["PYTHONPATH"].split(os.pathsep)[0], "trainer/ops/watcher/__main__.py").is_file()


def test_a_rank_that_has_joined_before_starts_no_second_watcher(started: Started) -> None:
    here = described()
    assert hang.describe(world(1), None) is None
    hang.start(world(0), [here, here, here, None], None)
    assert started == []


def test_a_single_rank_is_not_watched() -> None:
    assert hang.describe(World(), None) is None


@pytest.mark.parametrize(("given_s", "count"), [(0.0, 0), (None, 1)])
def test_a_recorder_is_followed_where_hangs_are_watched_for(
    started: Started, monkeypatch: pytest.MonkeyPatch, given_s: float | None, count: int
) -> None:
    seen = []
    monkeypatch.setattr(hang, "follow", lambda recorder, is_root: seen.append(is_root))
    hang.start(world(0), [described(given_s)] * 4, lambda with_entries: b"{}")
    assert seen == [True] * count
    assert len(started) == count


@pytest.mark.parametrize(
    ("given", "variable", "limit_s", "start_s"),
    [(None, "", None, 1800), (60.0, "", 60, 1800), (3.0, "3600", 3600, 3600), (0.0, "", 0, 0), (60.0, "0", 0, 0)],
)
def test_the_variable_is_first_and_the_start_has_half_an_hour_at_least(
    given: float | None, variable: str, limit_s: float | None, start_s: float
) -> None:
    assert hang_timeout_s(given, {"TRAINER_HANG_TIMEOUT": variable}) == limit_s
    assert start_limit_s(limit_s) == start_s


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_what_is_no_number_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^TRAINER_HANG_TIMEOUT is '{text}'; valid is a number of seconds, or 0 to"):
        hang_timeout_s(None, {"TRAINER_HANG_TIMEOUT": text})


@pytest.mark.parametrize("what", ["open_record", "host_id", "subprocess.Popen"])
def test_what_fails_is_said_and_ends_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(f"trainer.watch.start.{what}", fail)
    hang.start(world(1), [OTHER, described(), OTHER, OTHER], None)
    assert started == []
    where = "" if what == "subprocess.Popen" else "rank 1: "
    assert f"{where}PermissionError: [Errno 1] not permitted" in capfd.readouterr().err


def test_the_watcher_starts_without_pytorch() -> None:
    script = "import sys, trainer.ops.watcher.__main__; print('torch' in sys.modules, 'psutil' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


# The handler that is registered first is called last.
ENDING = """
import atexit, pathlib, sys
from trainer.watch import start
from trainer.watch.heartbeat import Heartbeat
from trainer.cluster.world import World
atexit.register(lambda: print(repr(Heartbeat.from_bytes(path.read_bytes()).is_at_end)))
path = pathlib.Path(start.describe(World(rank=0, size=2), None).record)
sys.excepthook = lambda *_: None
{end}
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("end", "is_at_end"), [("pass", True), ("sys.exit(3)", True), ("1 / 0", False)])
def test_a_script_that_an_exception_ends_has_not_come_to_its_end(end: str, is_at_end: bool) -> None:
    """Also where another hook has shown the exception, so that Python ends as ever."""
    done = subprocess.run([sys.executable, "-c", ENDING.format(end=end)], capture_output=True, text=True, check=False)
    assert done.stdout == f"{is_at_end}\n", done.stderr
