"""`trainer doctor` as a command: options, exit codes, what it prints, and that it needs no PyTorch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.doctor_catalogue import CAUSES
from benchmarks.doctor_faults import Trial, render
from tests.docker.test_doctor import SHORT
from tests.unit.doctor_facts import findings_of, healthy, pair
from trainer.cli import main
from trainer.ops.doctor.examine import as_json, as_text, exit_code
from trainer.ops.doctor.facts import Facts
from trainer.ops.supervise.hosts import Host


def test_options_and_the_script_within_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, ...]] = []

    def look(*arguments: object, with_gpus: bool) -> Facts:
        asked.append((*arguments, with_gpus))
        return healthy()

    monkeypatch.setattr("trainer.ops.doctor.examine.look", look)
    assert main(["doctor"]) == 0
    words = ("-H", "a:2,b:2", "--json", "--gpu", "--timeout", "10", "python", "x/train.py", "--json")
    assert main(["doctor", *words]) == 0
    assert main(["doctor", "--", "python", "train.py"]) == 0
    assert main(["doctor", "./train"]) == 0
    assert asked == [
        ((Host("localhost", 1),), "", 20.0, False),
        ((Host("a", 2), Host("b", 2)), "x/train.py", 10.0, True),
        ((Host("localhost", 1),), "train.py", 20.0, False),
        ((Host("localhost", 1),), "", 20.0, False),
    ]
    printed = capsys.readouterr().out
    assert printed.count("trainer doctor: ok") == 3
    assert printed.count('"findings": []') == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-H", "a:x"), "trainer doctor: -H has 'a:x'; valid is HOST:SLOTS, as in a:2,b:2"),
        (("--timeout", "1"), "trainer doctor: --timeout is 1; valid is 5 to 100"),
        (("--timeout", "nan"), "trainer doctor: --timeout is nan; valid is 5 to 100"),
    ],
)
def test_a_value_that_is_not_valid_is_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.strip() == message


def test_other_hosts_without_ssh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/no")
    assert main(["doctor", "-H", "elsewhere:1"]) == 2
    assert "there is no ssh to reach it" in capsys.readouterr().err


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.ops.doctor.examine.look", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "trainer doctor: interrupted\n"


def test_this_host_is_looked_at_without_pytorch() -> None:
    program = "import sys; from trainer.cli import main; main(['doctor']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "login localhost" in done.stdout


def test_what_is_well_is_one_line() -> None:
    said = as_text(healthy(), [], 4.2)
    assert said == (
        "trainer doctor: ok: login a 0.1 s, b 0.3 s; each two hosts 8 Gbit/s and 0.1 ms at worst; Python 3.11.2, "
        "PyTorch 2.14.1, Horovod 0.28.1, Open MPI 4.1.8 (4.2 s)"
    )


def test_findings_come_first_and_exit_codes_tell_them_apart() -> None:
    slow = healthy(pairs={("a", "b"): pair("b", bytes_per_s=1e6), ("b", "a"): pair("a")})
    broken = healthy(pairs={("a", "b"): pair("b", errors={"1": "timed out"}), ("b", "a"): pair("a")})
    partly = replace(healthy(), incomplete=("host b: gone",))
    assert [exit_code(facts, findings_of(facts)) for facts in (healthy(), slow, broken, partly)] == [0, 0, 1, 2]
    assert as_text(broken, findings_of(broken), 1.0).startswith("trainer doctor: PROBLEM: a cannot connect to b")
    assert (
        as_text(slow, findings_of(slow), 1.0)
        .splitlines()[0]
        .startswith("trainer doctor: WARNING: from b to a come 8 M")
    )
    assert "trainer doctor: NOT LOOKED AT: host b: gone" in as_text(partly, [], 1.0)
    hostile = replace(partly, incomplete=("host b: \x1b]0;owned\x07\r",))
    assert "NOT LOOKED AT: host b: ?]0;owned??" in as_text(hostile, [], 1.0)


def test_json_has_findings_and_facts() -> None:
    facts = healthy(pairs={("a", "b"): pair("b", errors={"1": "timed out"}), ("b", "a"): pair("a")})
    said = json.loads(as_json(facts, findings_of(facts), 1.0))
    (finding,) = said["findings"]
    assert (finding["level"], finding["cause"], finding["hosts"]) == ("problem", "reach", ["a", "b"])
    assert said["hosts"]["b"]["software"]["versions"]["PyTorch"] == "2.14.1"
    assert said["pairs"][0]["errors"] == {"1": "timed out"}


def test_the_catalogue_of_causes() -> None:
    titles = [cause.title for cause in CAUSES]
    assert len(set(titles)) == len(titles)
    assert set(SHORT) <= set(titles)
    words = {"a": "10.0.0.1", "b": "10.0.0.2", "container": "x", "process": "1", "root": "/"}
    for cause in CAUSES:
        re.compile(cause.first_line)
        assert not any(
            "{" in script.format(**words) and "}" not in script
            for step in cause.steps
            for script in (step.do, step.undo)
        )


def test_a_trial_is_right_with_its_line_its_code_and_in_time() -> None:
    cause = next(cause for cause in CAUSES if cause.title == "b's .bashrc prints")
    line = "PROBLEM: the login shell on b prints 'Welcome to b' before; remedy"
    right = Trial(cause, line, lines=1, code=1, seconds=3.0)
    assert right.is_right
    wrong = (
        replace(right, first_line=""),
        replace(right, code=0),
        replace(right, seconds=21.0),
        replace(right, first_line=line.replace("PROBLEM", "WARNING")),
        replace(right, lines=9),
        replace(right, first_line=line.replace("PROBLEM", "WARNING"), code=0),
    )
    assert not any(trial.is_right for trial in wrong)
    table = render([right, wrong[0]])
    assert (
        "| ssh | b's .bashrc prints | `PROBLEM: the login shell on b prints 'Welcome to b' before` | 3.0 | yes |"
        in table
    )
    assert "| **no** |" in table
