"""The package's public names: what `import trainer` offers, and that it loads them on first use only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainer


@pytest.mark.parametrize("name", trainer.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(trainer, name).__module__.startswith("trainer.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'trainer' has no attribute 'Trainr'"):
        _ = trainer.Trainr


def test_importing_the_package_loads_no_pytorch() -> None:
    code = "import sys, trainer; print('torch' in sys.modules); trainer.TrainerConfig; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.split() == ["False", "False"]


def test_the_reference_shows_every_public_name() -> None:
    page = Path(trainer.__file__).parent.parent / "docs" / "reference.md"
    assert sorted(re.findall(r"^::: trainer\.(\w+)$", page.read_text(), re.MULTILINE)) == trainer.__all__
