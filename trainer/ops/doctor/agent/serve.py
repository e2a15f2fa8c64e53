"""The agent's loop: answers requests, one JSON object a line, until its input ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

LONGEST_S = 180
"""An agent whose connection hangs ends by itself after that."""


def main() -> None:
    """Read the source of the operations, then answer requests."""
    signal.alarm(LONGEST_S)
    operations: dict[str, Callable[..., Any]] = {}
    sys.modules["trainer_doctor"] = types.ModuleType("trainer_doctor")
    for name, source in json.loads(sys.stdin.buffer.readline()).items():
        module = types.ModuleType(f"trainer_doctor.{name}")
        module.__package__ = "trainer_doctor"
        sys.modules[module.__name__] = module
        exec(compile(source, f"{name}.py", "exec"), vars(module))  # noqa: S102 (our own source, through our own ssh)
        operations.update(getattr(module, "OPERATIONS", {}))
    lock = threading.Lock()
    for line in sys.stdin.buffer:
        threading.Thread(target=_answer, args=(json.loads(line), operations, lock), daemon=True).start()
    os._exit(0)  # waits for no thread


def _answer(request: dict[str, Any], operations: dict[str, Callable[..., Any]], lock: threading.Lock) -> None:
    reply: dict[str, Any] = {"id": request["id"]}
    try:
        reply["value"] = operations[request["operation"]](**request["arguments"])
    except Exception as error:
        reply["error"] = f"{type(error).__name__}: {error}"
    with lock:
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
