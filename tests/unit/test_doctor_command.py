"""`trainer doctor` as a command: options, exit codes, what it prints, and that it needs no PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docker.doctor_causes import CAUSES
from tests.docker.test_doctor import SHORT
from tests.unit.doctor_facts import healthy
from trainer.cli import main
from trainer.ops.doctor.checks import Facts
from trainer.ops.doctor.command import as_text
from trainer.ops.supervise.hosts import Host


def test_options_and_the_script_within_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def look(*arguments: object, with_gpus: bool) -> Facts:
        asked.append((*arguments, with_gpus))
        return healthy()

    monkeypatch.setattr("trainer.ops.doctor.command.look", look)
    words = ("-H", "a:2,b:2", "--gpu", "--timeout", "10", "python", "x/train.py", "--gpu")
    assert [main(["doctor"]), main(["doctor", *words])] == [0, 0]
    assert asked == [
        ((Host("localhost", 1),), "", 20.0, False),
        ((Host("a", 2), Host("b", 2)), "x/train.py", 10.0, True),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-H", "a:x"), "-H has 'a:x'; valid is HOST:SLOTS, as in a:2,b:2"),
        (("--timeout", "nan"), "--timeout is nan; valid is 5 to 100"),
        (("nosuchhost",), "nosuchhost is neither a program nor a file; hosts are given with -H, as in -H a:2,b:2"),
        (("-H", "elsewhere:1"), "-H names elsewhere, and there is no ssh to reach it; install openssh-client"),
    ],
)
def test_a_value_that_is_not_valid_is_named(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/no")
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err == f"trainer doctor: {message}\n"


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.ops.doctor.command.look", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "trainer doctor: interrupted\n"


def test_this_host_is_looked_at_without_pytorch() -> None:
    program = "import sys; from trainer.cli import main; main(['doctor']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "login localhost" in done.stdout


def test_what_is_well_is_one_line() -> None:
    facts = healthy()
    facts.all_reduces = [{"hosts": ["a", "b"], "bus_bytes_per_s": 230e9}]
    well = "login a 0.1 s, b 0.1 s; each two hosts 8 Gbit/s at worst; all-reduce between two GPUs of a and b 230 GB/s; "
    assert (
        as_text(facts, [], 4.2) == f"trainer doctor: ok: {well}PyTorch 2.14.1, Horovod 0.28.1, Open MPI 4.1.8 (4.2 s)"
    )


@pytest.mark.parametrize(
    ("errors", "rate", "incomplete", "code", "line"),
    [
        ({}, 1e6, [], 0, "WARNING: from b to a come 8 Mbit/s"),
        ({"1": "timed out"}, 1e9, ["host c: gone"], 1, "PROBLEM: a cannot connect to b"),
        ({}, 1e9, ["host c: \x1b]0;owned\x07\r"], 2, "NOT LOOKED AT: host c: ?]0;owned??"),
    ],
)
def test_findings_come_first_and_exit_codes_tell_them_apart(
    errors: dict[str, str], rate: float, incomplete: list[str], code: int, line: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    facts = healthy()
    facts.pairs["a", "b"].update(errors=errors, bytes_per_s=rate)
    facts.incomplete = incomplete
    monkeypatch.setattr("trainer.ops.doctor.command.look", lambda *_, **__: facts)
    assert main(["doctor"]) == code
    printed = capsys.readouterr().out
    assert printed.startswith(f"trainer doctor: {line}")
    assert "trainer doctor: otherwise: login a 0.1 s" in printed


def test_the_causes_that_containers_make() -> None:
    assert set(SHORT) <= {cause.title for cause in CAUSES}
    words = {"a": "10.0.0.1", "b": "10.0.0.2", "container": "x", "process": "1", "root": "/"}
    for cause in CAUSES:
        re.compile(cause.first_line)
        for step in cause.steps:
            assert "{{" not in f"{step.do}{step.undo}".format(**words)
