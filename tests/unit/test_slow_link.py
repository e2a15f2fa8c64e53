"""The comparison on a slow link: its table, and that it leaves no network namespace behind."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks import slow_link
from trainer.errors import TrainerError


def test_medians_are_compared_with_the_first_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"none": [4.0, 2.0, 9.0], "powersgd:4": [0.1, 0.4, 0.2]}
    monkeypatch.setattr("sys.argv", ["slow_link", "--settings", *times, "--repeats", "3"])
    monkeypatch.setattr(slow_link, "slow_hosts", lambda rate: nullcontext())
    monkeypatch.setattr(slow_link, "time_update", lambda name, updates: times[name].pop(0))
    assert slow_link.main() == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[-2:] == ["| none | 4.000 | 100 | 1 |", "| powersgd:4 | 0.200 | 2,000 | 20 |"]


def test_a_rate_that_tc_does_not_take_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(slow_link, "hosts", lambda folder: nullcontext({}))
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(TrainerError, match="this needs root, ip and tc"), slow_link.slow_hosts("fast"):
        raise AssertionError("the hosts were not made")


def test_a_training_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode = 1

        def communicate(self) -> tuple[str, None]:
            return "", None

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Failed())
    with pytest.raises(TrainerError, match="the training under fp16 has failed"):
        slow_link.time_update("fp16", 2)


@pytest.mark.parametrize("name", slow_link.SETTINGS)
def test_every_setting_trains(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_link, "BATCH", 2)
    monkeypatch.setattr("trainer.run.join", _single)
    slow_link.train(slow_link.SETTINGS[name], updates=1)
    assert '{"seconds": ' in capsys.readouterr().out


def _single(*_: Any) -> Any:
    from trainer.launch.world import World
    from trainer.strategies.single import SingleStrategy

    return SingleStrategy(World())
