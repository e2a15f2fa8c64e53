"""Each target of the fuzzer takes what its own writer makes, and inputs like it: few, or as `make fuzz` says, many."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.fuzz.target import Target
from tests.security.fuzz.targets import TARGETS

INPUTS = int(os.environ.get("FUZZ_INPUTS", "0"))
Edit = tuple[int, int, bytes]
"""A place, how many bytes are taken away there, and what is put there instead."""
EDITS = st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 64), st.binary(max_size=16)), max_size=4)


def changed(data: bytes, edits: list[Edit]) -> bytes:
    for place, cut, new in edits:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + cut :]
    return data


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_raises_only_what_is_documented(target: Target) -> None:
    valid = target.valid()
    for data in valid:
        target.run(data)

    # The same inputs every time: new ones are for `make fuzz`, which also bounds the time that each takes.
    @settings(
        max_examples=INPUTS or 30, derandomize=not INPUTS, deadline=1000 if INPUTS else None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.builds(changed, st.sampled_from(valid), EDITS))
    def check(data: bytes) -> None:
        target.run(data)

    check()
