"""The calls of `trainer doctor`: the way to a host, through a program named ssh that is a shell script, and its end."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor_facts import healthy
from trainer.ops.doctor import call as calls
from trainer.ops.doctor import look as looking
from trainer.ops.doctor.call import HANGS, MARK, NO_ANSWER, Call, CallError, command, source_of
from trainer.ops.doctor.checks import Facts, HostFacts
from trainer.ops.doctor.look import look
from trainer.ops.supervise.hosts import Host

HERE, ELSEWHERE = Host("localhost", 1), Host("elsewhere", 1)
THERE = 'exec sh -c "$command"'


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a program named ssh, which is this shell script; $command is what a host would run."""

    def make(script: str) -> None:
        program = tmp_path / "ssh"
        program.write_text(f'#!/bin/sh\n[ "$1" != -G ] || exit 0\nfor command; do :; done\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


def test_what_ssh_is_given_is_one_line_because_a_csh_reads_it_too() -> None:
    assert not set("\n!") & set(" ".join(command())), "its quotes end with the line, and ! is expanded within them"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'debug1: Connecting' >&2; echo 'Permission denied.' >&2; exit 255", "Permission denied."),
        ("exit 3", "the call has ended with code 3"),
        ("exec sleep 60", NO_ANSWER),
        ("echo 'debug1: SSH2_MSG_KEXINIT sent' >&2; echo; exec sleep 60", HANGS),
        ("printf 'debug1: SSH2_MSG_KEXINIT sent\nSSH2_MSG_NEWKEYS received' >&2; echo; exec sleep 60", NO_ANSWER),
        ("printf xx; head -c 32000000 /dev/zero | tr '\\0' x | tee /dev/stderr > /dev/null; exit 3", "xxxx"),
    ],
)
def test_why_no_answer_comes(script: str, why: str, ssh: Callable[[str], None]) -> None:
    """Also if what is printed has no end: it takes no memory."""
    ssh(script)
    tracemalloc.start()
    with Call(ELSEWHERE, "exchange", {}) as call:
        assert not call.has_started(1.0)
        assert call.why().startswith(why)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_what_is_no_answer_is_not_heard(ssh: Callable[[str], None]) -> None:
    ssh(f"echo {MARK}; echo noise; echo '{{\"answer\": 1}}'; echo '{{\"answer\": '; cat")
    with Call(ELSEWHERE, "exchange", {}) as call:
        assert call.has_started(10)
        assert call.answer(10) == 1
        with pytest.raises(CallError, match="host elsewhere"):
            call.answer(1)


# The first call


def test_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = look([HERE], "train.py", 20, with_gpus=False)
    (host,) = facts.answering
    assert (facts.incomplete, host.login_error, host.printed) == ([], "", "")
    assert abs(host.seconds_ahead) < 0.1
    assert host.answer["host_name"] == facts.here
    assert any(f"there is no train.py in {tmp_path}" in line for _, line in host.answer["findings"])


def through(script: str, ssh: Callable[[str], None], timeout_s: float = 20) -> Facts:
    ssh(script)
    return look([ELSEWHERE], "", timeout_s, with_gpus=True)


def test_another_host_whose_login_shell_prints_and_whose_clock_is_ahead(
    ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "source_of", lambda name: source_of(name).replace("time.time()", "time.time() + 3600"))
    facts = through(f'sleep 1; echo; echo Welcome; printf "to b"; {THERE}', ssh)
    (host,) = facts.answering
    assert (facts.incomplete, host.login_error, host.printed) == ([], "", "Welcome")
    assert [name for name, _ in host.answer["names"]] == ["elsewhere"]
    assert 3598 < host.seconds_ahead <= 3600, "as far as the call cannot explain"
    assert host.login_s >= 1


def test_a_host_that_logs_in_and_does_not_answer_is_not_looked_at(ssh: Callable[[str], None]) -> None:
    facts = through(f"echo {MARK}; exec sleep 60", ssh, timeout_s=1)
    assert facts.incomplete == ["host elsewhere: no answer in time"]


def test_a_part_that_fails_does_not_take_the_others_along(
    ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "source_of", lambda name: source_of(name).replace("socket.getaddrinfo(", "(1 / 0)("))
    facts = through(THERE, ssh)
    assert facts.incomplete == ["host elsewhere: names: ZeroDivisionError: division by zero"]
    assert facts.hosts[0].answer["software"]


def test_a_host_without_python(ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    (host,) = through(f'PATH={tmp_path}/bin exec /bin/sh -c "$command"', ssh).hosts
    assert host.login_error.endswith("no python3 on the PATH")
    assert not host.answer


# The second call


def test_hosts_are_connected_with_each_other(ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, both this one, which see each other at an address that is given for another one's."""
    ssh(THERE)
    seen = {"addresses": ["127.0.0.2"], "error": "", "source": "127.0.0.3", "interface": "eth0"}
    change = f"\nresolve = lambda name, found: {seen}\nif __name__"
    monkeypatch.setattr(calls, "source_of", lambda name: source_of(name).replace("\nif __name__", change))
    facts = look([ELSEWHERE, Host("other", 1)], "", 20, with_gpus=False)
    assert facts.incomplete == []
    assert facts.pairs.keys() == {("elsewhere", "other"), ("other", "elsewhere")}
    for pair in facts.pairs.values():
        assert (pair["address"], set(pair["errors"].values()), len(pair["errors"])) == ("127.0.0.3", {""}, 3)
        assert pair["bytes_per_s"] > 1e6


# The all-reduces, which take their time: only which are tried


def test_which_all_reduces_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(hosts: tuple[HostFacts, ...]) -> dict[str, Any]:
        tried.append(tuple(map(str, hosts)))
        return {"hosts": []}

    tried: list[tuple[str, ...]] = []
    monkeypatch.setattr(looking, "all_reduce", all_reduce)
    facts = healthy()
    looking.try_all_reduces(facts)
    assert tried == [], "there are no GPUs"
    facts.hosts[0].answer["gpus"], facts.hosts[1].answer["gpus"] = [["0"]], [["0"], ["1"], ["2"]]
    looking.try_all_reduces(facts)
    assert sorted(tried[:2]) == [("a",), ("b", "b")]
    assert tried[2:] == [("a", "b")]
    facts.all_reduces.append({"error": "x"})
    looking.try_all_reduces(facts)
    assert len(tried) == 3
