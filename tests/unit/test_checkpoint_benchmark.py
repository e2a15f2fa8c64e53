"""The benchmark of checkpoints: what is computed from its blocks, its table, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import checkpoints
from benchmarks.checkpoint_loop import Block
from benchmarks.checkpoint_savers import SAVERS
from benchmarks.launching import ROOT


def make_block(saver: str, number: int, seconds: float, *stalls_s: float, meanwhile_s: float | None = None) -> Block:
    return Block(
        saver=saver,
        round=number,
        seconds=seconds,
        stalls_s=stalls_s,
        writes_s=[10 * stall for stall in stalls_s],
        update_s=0.1,
        meanwhile_s=meanwhile_s,
    )


def test_ratios_and_differences_are_taken_within_a_round() -> None:
    # The machine is four times slower in round 1, for all.
    blocks = [
        *(make_block("none", number, seconds) for number, seconds in enumerate((10.0, 40.0, 10.0))),
        *(make_block("copy", number, 10.0, stall, stall) for number, stall in enumerate((0.01, 0.04, 0.01))),
        make_block("ours", 0, 11.0, 0.012, 0.012, meanwhile_s=0.12),
        make_block("ours", 1, 44.0, 0.048, 0.048, meanwhile_s=0.15),
        make_block("ours", 2, 11.0, 0.020, 0.020),
    ]
    none, copy, ours = checkpoints.make_rows(2, blocks, samples=22_000)
    assert (none.stall_s, none.times_copy, none.each_s, none.minute_percent) == (None, None, None, None)
    assert copy.times_copy == 1.0
    assert ours.samples_per_s == 2000
    assert ours.stall_s == (0.020, 0.012, 0.048)
    assert ours.times_copy == pytest.approx(1.2)
    assert ours.write_s == pytest.approx(0.2)
    assert ours.overhead_percent == pytest.approx(10.0)
    assert ours.meanwhile_percent == pytest.approx(35.0)
    assert ours.each_s == pytest.approx(0.5)
    assert ours.minute_percent == pytest.approx(100 * 0.5 / 60)


def test_the_table_leaves_out_what_was_not_measured() -> None:
    rows = checkpoints.make_rows(1, [make_block("none", 0, 2.0), make_block("ours", 0, 2.5, 0.01)], samples=1000)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in checkpoints.table(rows).splitlines()[2:]]
    assert cells == [
        ["1", "no checkpoints", "", "", "", "", "500", "", "", ""],
        ["1", "**trainer**", "10.0 (10.0 – 10.0)", "", "0.10", "", "400", "+25.0 %", "0.500", "+0.83 %"],
    ]


def test_a_number_that_is_not_valid_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        checkpoints.main(["--updates", "1"])
    assert "--updates at least 2" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_short_run_measures_every_way_of_saving(tmp_path: Path, ranks: int) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--dataset", "digits", "--network", "tutorial"]
    command += ["--ranks", str(ranks), "--repeats", "1", "--updates", "4", "--folder", str(tmp_path / "new")]
    done = subprocess.run([*command, "--json", str(result)], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    blocks = json.loads(result.read_text())["blocks"][str(ranks)]
    assert [block["saver"] for block in blocks] == list(SAVERS)
    for block in blocks:
        saved = 0 if block["saver"] == "none" else 2
        assert (len(block["stalls_s"]), len(block["writes_s"])) == (saved, saved)
    assert not list((tmp_path / "new").iterdir())
