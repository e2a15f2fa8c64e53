"""What `trainer run` says: one line for each event on standard error, and the same in events.jsonl."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.cluster.output import print_line

PREFIX = "trainer run: "


class Events:
    """Lines for people, with facts for programs.

    Args:
        path: the file to append to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, kind: str, text: str, **facts: Any) -> None:
        """Print one or more lines, and append an event to the file; a full disk does not end the job."""
        with suppress(OSError, ValueError):  # nobody reads any more
            print_line("\n".join(PREFIX + line for line in text.splitlines()), sys.stderr)
        self.note(kind, text=text, **facts)

    def note(self, kind: str, **facts: Any) -> None:
        """Append an event to the file."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **facts}
        with suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
