"""The folder of a supervised job, the events in it, and the summary."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import ConfigError, TrainerError
from trainer.ops.supervise.folder import Events, locked
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.outcome import Attempt, Judgement, Times, Verdict
from trainer.ops.supervise.summary import recovery_of, summarize, training_share

JOB = "0123456789abcdef" * 2
HOSTS = (Host("a", 2), Host("b", 2))


def test_a_job_is_supervised_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "train"
    script = "import sys; from pathlib import Path; from trainer.ops.supervise.folder import locked\n"
    script += "with locked(Path(sys.argv[1]), 'b' * 32): pass"
    command = [sys.executable, "-c", script, str(folder)]
    refused = pytest.raises(ConfigError, match=f"already supervised by process {os.getpid()};")
    with locked(folder, JOB), refused, locked(folder, JOB):
        pass
    with locked(folder, JOB):
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_a_file_system_without_locks_is_no_other_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path, JOB):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} {JOB}\n"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match="cannot be written: Not a directory"), locked(tmp_path / "file" / "x", JOB):
        pass


def test_a_job_that_was_not_ended_is_found_again(tmp_path: Path) -> None:
    for text, found in [(f"1 {JOB}\n", JOB), (f"1 {JOB}/../x\n", ""), ("1 0\n", ""), ("\n", "")]:
        (tmp_path / "lock").write_text(text)
        with locked(tmp_path, "b" * 32) as former:
            assert former == found
    with locked(tmp_path, JOB) as former:
        assert former == "", "the last one has ended in good order"


def test_an_event_is_a_line_for_people_and_one_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path / "events.jsonl")
    events.say("start", "attempt 1\non a", attempt=1)
    events.note("summary", attempts=[])
    assert capsys.readouterr().err == "trainer run: attempt 1\ntrainer run: on a\n"
    entries = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(entry["event"], entry.get("attempt")) for entry in entries] == [("start", 1), ("summary", None)]


def test_events_that_cannot_be_written_do_not_end_the_job(tmp_path: Path) -> None:
    Events(tmp_path / "nowhere" / "events.jsonl").say("start", "attempt 1")


def attempts() -> list[Attempt]:
    failed = Attempt(HOSTS, "x", Times(0.0, 3.0, 4.0, 10.0, 10.5, 12.0), 0.0, updates=(1, 50))
    failed.judgement = Judgement(Verdict.FAILED, "rank 1 on b died without a word in update 51", ("b",))
    done = Attempt(HOSTS[:1], "y", Times(12.5, 15.5, 16.5, 19.5, 19.75, 20.0), 12.5, updates=(41, 100))
    done.judgement = Judgement(Verdict.DONE, "done", code=0, is_last=True)
    return [failed, done]


def test_a_recovery_goes_from_the_last_progress_to_the_first_update() -> None:
    assert recovery_of(*attempts()) == {
        "detected": 0.5,
        "ended": 1.5,
        "started": 0.5,
        "joined": 3.0,
        "first update": 1.0,
        "total": 6.5,
    }
    failed, done = attempts()
    done.times.first_update = None
    assert recovery_of(failed, done) == {}


def test_the_share_of_training_leaves_out_starts_and_ends() -> None:
    assert training_share(attempts()) == pytest.approx((6 + 3) / 20)
    assert training_share([Attempt(HOSTS, "x", Times(0.0), 0.0)]) == 0


def test_the_summary_has_aligned_columns() -> None:
    head, first, second, recovery, share = summarize(attempts()).splitlines()
    for column in ("ranks", "hosts", "updates", "recovery", "end"):
        at = head.index(column)
        assert first[at - 2 : at] == second[at - 2 : at] == "  "
        assert first[at] != " " != second[at]
    assert first.split()[2:6] == ["4", "a:2,b:2", "1–50", "–"]
    assert second.split()[2:] == ["2", "a:2", "41–100", "6.5", "s", "done"]
    parts = "detected 0.5 s, ended 1.5 s, started 0.5 s, joined 3.0 s, first update 1.0 s, total 6.5 s"
    assert recovery == f"recovery of attempt 2: {parts}"
    assert share == "45 % of the time was training"
