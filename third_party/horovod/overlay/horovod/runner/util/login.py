"""Waits for the hosts of a job to accept a login, and says in a line each why one does not."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from horovod.runner.util.remote import get_remote_command

# A host is logged in to until it answers or the start timeout runs out.
RETRY_INTERVAL_S = 1
# Seconds for a single attempt.
CONNECT_TIMEOUT_S = 10

# What ssh says about a host, or its name, that may only not be up yet.
_NOT_YET = re.compile(
    "Connection (refused|reset|closed|timed out)|timed out|No route to host|is unreachable|"
    "Could not resolve hostname|kex_exchange_identification|is booting up"
)
# What no waiting heals, even where ssh says one of the above besides.
_NEVER = re.compile("Permission denied|Host key verification failed")


class LoginError(RuntimeError):
    """Every line tells about one host."""


def _log_in(host: str, settings: Any) -> tuple[int, str]:
    """Try once; return the exit code and what ssh said."""
    limit = max(1, min(CONNECT_TIMEOUT_S, math.ceil(settings.start_timeout.remaining())))
    command = get_remote_command(
        "true", host=host, port=settings.ssh_port, identity_file=settings.ssh_identity_file, timeout_s=limit
    )
    try:
        login = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
            timeout=limit + 1,
        )
        return login.returncode, login.stderr.strip()
    except subprocess.TimeoutExpired:
        return 255, f"the login timed out after {limit + 1} s"


def _why_not(host: str, exit_code: int, said: str, waited: float) -> str:
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        return f"host {host} shows another host key than the pinned one, and is refused"
    if "Host key verification failed" in said:
        return f"host {host} shows a host key that is not known here, and is refused"
    lines = said.splitlines() or [f"exit code {exit_code}"]
    if "Permission denied" in said:
        bad_key = [line for line in lines if re.search("Load key|Identity file", line)]
        return f"host {host} does not accept this node's key: {'; '.join(bad_key + lines[-1:])}"
    unreached = [line for line in lines if "connect to host" in line]
    why = re.sub(r"^(ssh: )?connect to host \S+ port (\d+): (.*)", r"\3 on port \2", (unreached or lines)[-1])
    return f"cannot log in to host {host}: {why[:1].lower()}{why[1:]} (waited {waited:.0f} s)"


def _wait_for_host(host: str, settings: Any) -> str:
    """Return "" once a login has worked, or a line that says why none did."""
    start = time.monotonic()
    while True:
        exit_code, said = _log_in(host, settings)
        if exit_code == 0:
            return ""
        can_heal = exit_code == 255 and _NOT_YET.search(said) and not _NEVER.search(said)
        if not can_heal or settings.start_timeout.timed_out():
            return _why_not(host, exit_code, said, time.monotonic() - start)
        time.sleep(min(RETRY_INTERVAL_S, settings.start_timeout.remaining()))


def wait_for_hosts(hosts: Sequence[str], settings: Any) -> None:
    """Wait until each of these hosts accepts a login.

    Raises:
        LoginError: some do not, with a line for each of them.
    """
    reasons = {host: f"cannot log in to host {host}" for host in hosts}

    def wait_for(host: str) -> None:
        reasons[host] = _wait_for_host(host, settings)

    # Daemons, so that Ctrl-C need not wait for them.
    waiting = [threading.Thread(target=wait_for, args=(host,), daemon=True) for host in hosts]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    if lines := [reasons[host] for host in hosts if reasons[host]]:
        raise LoginError("\n".join(lines))
