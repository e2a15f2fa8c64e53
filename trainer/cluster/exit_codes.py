"""Exit codes of a rank, and of the commands that start ranks, which job scripts tell apart: those of sysexits.h."""

from __future__ import annotations

PREEMPTED = 75
"""EX_TEMPFAIL: the training was saved, and goes on when it is started again."""
MISTAKE = 78
"""EX_CONFIG: a user's mistake, which another start would repeat."""
