"""Jobs of horovodrun to attack: what they run, and the ports that they open."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.distributed.harness import BIN, MARK, ROOT, kill_job, processes_of, python_path

_START_TIMEOUT_S = 60.0


@dataclass
class Running:
    """A job that runs."""

    process: subprocess.Popen[bytes]
    mark: str
    output: Path

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports on which its processes listen, by the kernel's tables in /proc/net."""
        return {one for process in processes_of(self.mark) for one in listening(process)}

    def wait_for_port(self) -> int:
        """Return the first port that the launcher opens.

        Raises:
            TimeoutError: it opens none.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        launcher = psutil.Process(self.process.pid)
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := listening(launcher):
                return min(port for _, port in found)
            time.sleep(0.01)
        raise TimeoutError(f"no port was opened:\n{self.text()}")

    def text(self) -> str:
        return self.output.read_text(errors="replace")


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports on which a process listens; none where it has ended."""
    try:
        found = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return set()
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


@contextmanager
def running(command: list[str], folder: Path = ROOT) -> Iterator[Running]:
    """Start a job in a folder, and leave nothing of it behind."""
    with tempfile.TemporaryDirectory(prefix="trainer-security-") as mark:
        env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path(ROOT)}
        env |= {MARK: mark, "TMPDIR": mark, "PYTHONUNBUFFERED": "1"}
        output = Path(mark, "output")
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
        try:
            yield Running(process, mark, output)
        finally:
            kill_job(mark)
            process.wait()
