"""The start of the watch: what fails ends no job, all ranks take part in the broadcast, and it can be switched off."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.watch import heartbeat
from trainer.watch import start as hang
from trainer.watch.heartbeat import SIGNAL
from trainer.watch.recorder import Recorder
from trainer.watch.start import Entry, connection_limit_s, hang_timeout_s

OTHER = Entry("b boot ns", "/proc/1/fd/1")
"""What a rank of another host tells."""


class Ranks:
    """A strategy of two ranks whose other one has the same to say."""

    def __init__(self) -> None:
        self.world = World(rank=0, size=2, local_rank=0, local_size=2)
        self.broadcasts: list[Any] = []
        self.flight_recorder: Recorder | None = None

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self.broadcasts.append(value)
        return value


class Process:
    """A watcher that is only asked for."""

    started: ClassVar[list[tuple[list[str], dict[str, Any]]]] = []

    def __init__(self, command: list[str], **options: Any) -> None:
        read, write = os.pipe()
        os.close(read)
        self.stdin = os.fdopen(write, "wb")
        Process.started.append((command, {**options, "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ())}))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(Process, "started", [])
    monkeypatch.setattr("trainer.watch.start.subprocess.Popen", Process)
    monkeypatch.setattr("trainer.watch.start.atexit.register", lambda *_: None)
    monkeypatch.delenv("TRAINER_HANG_TIMEOUT", raising=False)
    yield Ranks()
    heartbeat.close_record()
    faulthandler.unregister(SIGNAL)


def start(ranks: Ranks, entries: Sequence[Entry | None], given_s: float | None) -> None:
    hang.start(ranks.world, entries, given_s, ranks.broadcast_object, ranks.flight_recorder)


def entries(ranks: Ranks) -> list[Entry | None]:
    entry = hang.describe(ranks.world)
    assert entry is not None
    return [entry, entry]


def test_one_watcher_is_started_on_a_host(ranks: Ranks) -> None:
    start(ranks, entries(ranks), None)
    ((command, options),) = Process.started
    assert command[-2:] == ["-m", "trainer.ops.watcher"]
    assert "pass_fds" not in options
    assert options["start_new_session"] is True
    assert ranks.broadcasts == [{"given_s": None, "start_s": 1800.0}]


def test_the_watcher_of_each_host_is_told_of_the_ranks_there(ranks: Ranks) -> None:
    here, _ = entries(ranks)
    assert here is not None
    start(ranks, [here, OTHER], 40.0)
    assert len(Process.started) == 1
    assert ranks.broadcasts == [{"given_s": 40.0, "start_s": 1800.0}]
    settings = hang._settings([here, OTHER], OTHER.host)
    assert settings == {"host": "b", "size": 2, "records": {1: OTHER.record}, "script": settings["script"]}


def test_the_watcher_finds_the_library_and_no_signal_stays_blocked(ranks: Ranks) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start(ranks, entries(ranks), None)
    ((_, options),) = Process.started
    assert Path(options["env"]["PYTHONPATH"].split(os.pathsep)[0], "trainer/ops/watcher/__main__.py").is_file()
    assert options["blocked"] >= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_rank_that_has_joined_before_keeps_all_from_the_broadcast(ranks: Ranks) -> None:
    here, _ = entries(ranks)
    start(ranks, [here, None], None)
    assert ranks.broadcasts == Process.started == []


def test_the_first_rank_that_can_be_watched_starts_the_watcher(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = entries(ranks)
    assert here is not None
    assert here.host.endswith(f" {Path('/proc/self/ns/pid').readlink()}")
    ranks.world = World(rank=2, size=3, local_rank=1, local_size=2)
    known = [OTHER, Entry(here.host, problem="why"), here]
    monkeypatch.setattr(ranks, "broadcast_object", lambda *_: {"given_s": None, "start_s": 1800.0})
    start(ranks, known, None)
    assert len(Process.started) == 1
    settings = hang._settings(known, here.host)
    assert settings["records"] == {2: here.record}


def test_without_rank_0_the_others_are_watched(ranks: Ranks) -> None:
    here, _ = entries(ranks)
    ranks.world = World(rank=0, size=2, local_rank=0, local_size=2)
    start(ranks, [Entry("a boot ns", problem="why"), here], None)
    assert ranks.broadcasts == [{"given_s": None, "start_s": 1800.0}]


@pytest.mark.parametrize(("timeout", "followed"), [("", 1), ("0", 0)])
def test_a_recorder_is_followed_where_hangs_are_watched_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, timeout: str, followed: int
) -> None:
    seen = []
    monkeypatch.setattr(hang, "follow", lambda recorder, is_root: seen.append((recorder, is_root)))
    monkeypatch.setenv("TRAINER_HANG_TIMEOUT", timeout)
    known = entries(ranks)
    start(ranks, known, None)
    assert seen == []
    ranks.flight_recorder = lambda with_entries: b"{}"
    start(ranks, known, None)
    assert seen == [(ranks.flight_recorder, True)] * followed


def test_a_single_rank_is_not_watched() -> None:
    assert hang.describe(World()) is None


@pytest.mark.parametrize(("given", "variable"), [(0.0, None), (None, "0"), (60.0, "0")])
def test_it_can_be_switched_off(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, given: float | None, variable: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("TRAINER_HANG_TIMEOUT", variable)
    start(ranks, entries(ranks), given)
    assert Process.started == []
    assert ranks.broadcasts == [None]
    assert heartbeat._record is None


def test_what_is_no_number_is_said_and_ends_nothing(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINER_HANG_TIMEOUT", "soon")
    start(ranks, entries(ranks), None)
    assert ranks.broadcasts == [None]
    line = "TRAINER_HANG_TIMEOUT is 'soon'; valid is a number of seconds, or 0 to watch for no hangs"
    assert line in capfd.readouterr().err
    for text in ("-1", "inf", "nan"):
        with pytest.raises(ConfigError):
            hang_timeout_s(None, {"TRAINER_HANG_TIMEOUT": text})
    assert hang_timeout_s(3.0, {"TRAINER_HANG_TIMEOUT": "7"}) == 7.0


def _fail(*_: object, **__: object) -> Any:
    raise OSError(1, "not permitted")


def test_a_watcher_that_cannot_be_started_is_said(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.watch.start.subprocess.Popen", _fail)
    start(ranks, entries(ranks), None)
    assert "not permitted" in capfd.readouterr().err


def test_a_rank_that_cannot_be_watched_takes_part_all_the_same(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here, _ = entries(ranks)
    heartbeat.close_record()
    monkeypatch.setattr(hang, "open_record", _fail)
    broken = hang.describe(ranks.world)
    assert broken is not None
    assert (broken.record, broken.problem) == ("", "PermissionError: [Errno 1] not permitted")
    start(ranks, [here, broken], None)
    assert len(ranks.broadcasts) == 1
    assert capfd.readouterr().err.count("hangs are not watched for on every rank") == 1


def test_a_rank_that_cannot_be_watched_notes_nothing(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "register", _fail)
    broken = hang.describe(ranks.world)
    assert broken is not None
    assert broken.record == ""
    assert heartbeat._record is None


def test_a_second_join_starts_no_second_watcher(ranks: Ranks) -> None:
    start(ranks, entries(ranks), None)
    start(ranks, [hang.describe(ranks.world)] * 2, None)
    assert len(Process.started) == len(ranks.broadcasts) == 1


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
entry = start.describe(World(rank=0, size=2, local_rank=0, local_size=2))
path = pathlib.Path(entry.record)
sys.excepthook = lambda *_: None
{end}
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("end", "is_at_end"), [("pass", True), ("sys.exit(3)", True), ("1 / 0", False)])
def test_a_script_that_an_exception_ends_has_not_come_to_its_end(end: str, is_at_end: bool) -> None:
    """Also where another hook has shown the exception, so that Python ends as ever."""
    done = subprocess.run([sys.executable, "-c", ENDING.format(end=end)], capture_output=True, text=True, check=False)
    assert done.stdout == f"{is_at_end}\n", done.stderr


@pytest.mark.parametrize(
    ("given_s", "variable", "limit_s"),
    [(None, "", 1800), (60.0, "", 1800), (3600.0, "", 3600), (0.0, "", 0), (3600.0, "0", 0), (0.0, "a", 1800)],
)
def test_ranks_may_take_as_long_to_connect_as_until_the_first_step(
    given_s: float | None, variable: str, limit_s: float
) -> None:
    assert connection_limit_s(given_s, {"TRAINER_HANG_TIMEOUT": variable}) == limit_s
