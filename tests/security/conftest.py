"""The rendezvous, for the tests that send requests to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.stores import Store, started


@pytest.fixture
def store() -> Iterator[Store]:
    with started() as store:
        yield store
