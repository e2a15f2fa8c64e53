"""The program of a watcher, over a process that is a rank: how long it watches, and how it ends one that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer.ops.watcher import __main__ as program
from trainer.ops.watcher.job import Settings
from trainer.watch.heartbeat import Heartbeat
from trainer.watch.job_folder import HANG, folder_name, parse_verdict

# A rank that has joined, and is in no collective, while ranks of other hosts may be.
RANK = """
import sys
from trainer.watch import heartbeat
heartbeat.report_join(0)
heartbeat.open_record(0)
heartbeat.note_step()
print(f"/proc/self/fd/{heartbeat._record.descriptor}", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setenv("TRAINER_JOB", "abc")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def watched(rank: subprocess.Popen[str], given_s: float | None) -> subprocess.Popen[bytes]:
    assert rank.stdout is not None
    record = rank.stdout.readline().strip().replace("self", str(rank.pid))
    settings = Settings("a", 2, given_s, 1800.0, "job", {"0": record})
    return subprocess.Popen([sys.executable, "-S", "-m", "trainer.ops.watcher", json.dumps(asdict(settings))])


def test_it_survives_the_signals_of_its_job_and_ends_with_its_rank(rank: subprocess.Popen[str]) -> None:
    watcher = watched(rank, None)
    while not ignores(watcher.pid, signal.SIGUSR2):
        time.sleep(0.01)
    for number in program._IGNORED:
        watcher.send_signal(number)
    time.sleep(0.3)
    assert watcher.poll() is None
    assert rank.stdin is not None
    rank.stdin.close()
    assert watcher.wait(timeout=5) == 0


def ignores(pid: int, number: int) -> bool:
    masks = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Sig" in line)
    return bool(int(masks["SigIgn"], 16) & 1 << (number - 1))


def test_it_ends_a_rank_that_hangs_and_notes_why_for_trainer_run(rank: subprocess.Popen[str], tmp_path: Path) -> None:
    assert watched(rank, 0.5).wait(timeout=15) == 0
    assert rank.wait(timeout=5) == -signal.SIGTERM
    folder = tmp_path / folder_name("abc", os.geteuid())
    verdict = parse_verdict((folder / "verdict.json").read_text())
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (HANG, (0,))
    assert "rank 0 on a is in no collective, and ranks of other hosts may be in one" in verdict.text
    record = Heartbeat.from_bytes((folder / "rank-0").read_bytes())
    assert record is not None
    assert record.steps == 1, "it outlives the rank"
    (file,) = tmp_path.glob("runs/job-hang-*-a.txt")
    assert "<string>" in file.read_text()
