"""Calls over ssh, through a program of that name which is a shell script."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.ops.ssh import DEBUG, NO_ANSWER, Call
from trainer.ops.supervise.hosts import Host

HERE, ELSEWHERE = Host("localhost", 1), Host("elsewhere", 1)
Start = Callable[..., Call]


@pytest.fixture
def through_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a call; $command is what a host would run."""
    started: list[Call] = []

    def start(script: str, *command: str) -> Call:
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\nfor command; do :; done\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        started.append(Call(ELSEWHERE, command or ["true"], DEBUG))
        return started[-1]

    yield start
    for call in started:
        call.close()


def test_lines_go_there_and_come_back(through_ssh: Start) -> None:
    for call in (
        Call(HERE, ["sed", "-u", "s/^/said: /"]),
        through_ssh('exec sh -c "$command"', "sed", "-u", "s/^/said: /"),
    ):
        with call:
            call.send(b"one")
            assert call.line(10) == b"said: one"
            call.send(b"two")
            assert call.line(10) == b"said: two"
            process = call._process.pid
        assert not Path(f"/proc/{process}").exists()


def test_arguments_reach_the_host_as_they_are(through_ssh: Start) -> None:
    assert through_ssh('exec sh -c "$command"', "printf", "%s\n", "a 'b' $c").line(10) == b"a 'b' $c"


def test_what_ssh_says_when_it_fails(through_ssh: Start) -> None:
    call = through_ssh("echo 'debug1: Connecting' >&2; echo 'Permission denied (publickey).' >&2; exit 255")
    assert call.line(10) is None
    assert call.why() == call.errors() == "Permission denied (publickey)."
    silent = through_ssh("exit 3")
    assert silent.line(10) is None
    assert silent.why() == "ssh has ended with code 3"


def test_a_call_that_hangs_is_given_up(through_ssh: Start) -> None:
    call = through_ssh("exec sleep 60")
    assert call.line(0.3) is None
    assert call.why() == NO_ANSWER
    began = time.monotonic()
    call.close()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("said", "is_in_key_exchange"),
    [
        ("debug1: SSH2_MSG_KEXINIT sent", True),
        ("debug1: Connecting to b", False),
        ("debug1: SSH2_MSG_KEXINIT sent\ndebug1: SSH2_MSG_NEWKEYS received", False),
    ],
)
def test_how_far_a_login_that_hangs_has_come(through_ssh: Start, said: str, is_in_key_exchange: bool) -> None:
    call = through_ssh(f"echo '{said}' >&2; echo; exec sleep 60")
    assert call.line(10) == b""
    assert call.is_in_key_exchange is is_in_key_exchange


def test_what_a_host_prints_without_an_end_takes_no_memory(through_ssh: Start) -> None:
    tracemalloc.start()
    try:
        call = through_ssh("head -c 32000000 /dev/zero | tr '\\0' x | tee /dev/stderr; exit 3")
        assert call.line(30) is None
        assert set(call.errors()) <= {"x"}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
