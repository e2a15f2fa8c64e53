"""Everything in this folder is marked `gpu`, and needs one unless it is rehearsed on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.machine import ON_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if ON_GPU:
                item.add_marker(pytest.mark.needs("gpu"))
