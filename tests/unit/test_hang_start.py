"""The start of the watch: what fails ends no job, one watcher is started on a host, and it can be switched off."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.harness import wait_until
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

    def start(command: Any, **options: Any) -> SimpleNamespace:
        seen.append((command, options))
        return SimpleNamespace(wait=partial((-9, 0).__getitem__, len(seen) > 1))  # the first is killed

    monkeypatch.setattr("trainer.watch.start.subprocess.Popen", start)
    yield seen
    heartbeat._forget()


def described(given_s: float | None = None) -> Entry:
    entry = hang.describe(world(1), given_s)
    assert entry is not None
    return entry


def test_the_first_rank_of_a_host_that_can_be_watched_starts_a_watcher(started: Started) -> None:
    here = described()
    assert here.host.endswith(f"-{Path('/proc/self/ns/pid').readlink()}")
    entries = [OTHER, Entry(None), here, here]
    for rank in (1, 3):
        hang.start(world(rank), entries, None)
    assert started == []
    hang.start(world(2), entries, None)
    wait_until(lambda: len(started) == 2, 5.0, lambda: "a watcher that was killed is not started again")
    (command, options), again = started
    assert again == (command, options)
    assert command[-3:-1] == ["-m", "trainer.ops.watcher"]
    settings = json.loads(command[-1])
    assert (settings["host"], settings["size"]) == (socket.gethostname(), 4)
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


@pytest.mark.parametrize("what", ["open_record", "namespace_id", "subprocess.Popen"])
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
