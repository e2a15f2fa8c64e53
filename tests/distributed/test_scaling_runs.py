"""The scaling test itself: its mistakes, short runs of the real thing, and an interruption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scaling.options import parse_args

from tests.distributed.harness import BIN, ROOT, python_path
from trainer import ConfigError

SCRIPT = "scripts/scaling_test.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "a"], "--hosts is 'a'; valid is host:ranks,host:ranks, as in a:2,b:2"),
        (["--hosts", "nobody:2"], "--hosts begins with nobody, and this is"),
        (["--scaling", "up"], "--scaling has 'up'; valid are weak, strong"),
        (["--steps", "some"], "--steps is 'some'; valid is a positive number, or all"),
        (["--batch-size", "3"], "--batch-size is 3, which 2 ranks cannot share in strong scaling"),
        (["--scaling", "weak", "--batch-flag", "", "--global-batch"], "--global-batch says what --batch-flag is for"),
        (["nowhere.py"], "there is no script nowhere.py"),
    ],
)
def test_an_option_that_is_not_valid_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--hosts", "localhost:2", *arguments])
    with pytest.raises(ConfigError) as caught:
        parse_args(None)
    assert words in str(caught.value)


@pytest.mark.slow  # tests/unit/test_scaling*.py have its parts
def test_the_whole_of_it_in_a_short_form(tmp_path: Path) -> None:
    options = "--hosts localhost:2 --steps 8 --repeats 1 --batch-size 40 --strategies ddp --scaling weak --output"
    mnist = "examples/mnist.py --dataset digits --epochs 1 --output none"
    done = subprocess.run(
        [sys.executable, SCRIPT, *options.split(), str(tmp_path), *mnist.split()], cwd=ROOT, text=True,
        capture_output=True, check=False, timeout=280,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "scaling.json").read_text())
    names = {(row["shape"]["per_host"], row["strategy"], row["scaling"]) for row in written["rows"]}
    assert names == {(1, "single", "both"), (2, "ddp", "weak")}
    for row in written["rows"]:
        assert row["measured"]["samples_per_s"] > 0
        assert (row["error"] is None) == (row["strategy"] == "single")
        assert row["batch"] == 40
    assert {(run["shape"], run["batch"]) for run in written["side_by_side"]} == {("1x2", 40)}
    assert all(run["samples_per_s"] > 0 for run in written["side_by_side"])
    assert set(written["networks"]) == {"ddp"}
    assert len(written["advice"]) == 1
    assert written["tried"] == []
    assert "1x2 under ddp: efficiency" in done.stdout
    assert (tmp_path / "scaling.html").stat().st_size > 20_000
