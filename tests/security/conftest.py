"""The launcher's stores, for the tests that send requests to both of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.stores import KINDS, Store, started


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with started(request.param) as one:
        yield one
