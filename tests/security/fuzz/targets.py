"""All targets."""

from __future__ import annotations

from tests.security.fuzz import disk, network

TARGETS = (*network.TARGETS, *disk.TARGETS)
