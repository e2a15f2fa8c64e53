"""With nothing but what the library's wheel declares, it trains under `python` and torchrun.

Every other package of the environment of the tests is hidden from the processes.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributed.harness import BIN, ROOT
from tests.distributed.snippets import in_shell

pytestmark = pytest.mark.timeout(150)

# Python imports a module of this name at every start.
_HIDES = """
import sys

class Hides:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = map(Hides, sys.meta_path)
"""
_SCRIPT = """
import sys
import torch
import trainer

torch.manual_seed(0)
dataset = trainer.InMemory(torch.randn(64, 20), torch.randint(3, (64,)))
model = torch.nn.Linear(20, 3)
trainer.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy,
    config=trainer.TrainerConfig(batch_size=4, device="cpu"), output="runs/record",
    checkpoint=trainer.CheckpointConfig(folder="runs/checkpoints"),
).fit(dataset, dataset, epochs=int(sys.argv[1]))
try:
    import yaml
except ModuleNotFoundError:
    print("nothing else is there")
"""


def _with_dependencies(requirements: Iterable[str]) -> set[str]:
    """Return the distributions of these requirements, and of their own."""
    found, left = set[str](), list(requirements)
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            left += metadata.requires(name) or []
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with which only the wheel's own dependencies can be imported."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    own = _with_dependencies(declared)
    modules = metadata.packages_distributions().items()
    hidden = {module for module, owners in modules if not own & set(map(canonicalize_name, owners))}
    assert {"yaml", "horovod", "mpi4py", "packaging", "grpc"} <= hidden
    folder = tmp_path_factory.mktemp("hides")
    (folder / "sitecustomize.py").write_text(_HIDES.format(hidden=hidden - {"trainer"}))
    return f"{folder}{os.pathsep}{ROOT}"


TORCHRUN = "python -m torch.distributed.run --nproc-per-node 2 train.py {epochs}"


@pytest.mark.parametrize(
    "commands",
    [
        ("python train.py {epochs}", TORCHRUN),
        pytest.param(("python -m trainer run -np 2 --torchrun python train.py {epochs}",) * 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_record_and_checkpoints_goes_on(tmp_path: Path, path: str, commands: tuple[str, str]) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    env = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path, "HOME": str(tmp_path)}
    for epochs, command in enumerate(commands, 1):
        outcome = in_shell(tmp_path, command.format(epochs=epochs), env=env)
        assert outcome.code == 0, outcome.output
        ranks = 1 if command.startswith("python train.py") else 2
        assert outcome.output.count("nothing else is there") == ranks, outcome.output
    assert "going on from checkpoint" in outcome.output
    (settings,) = tmp_path.glob("runs/record/**/settings.json")
    assert json.loads(settings.read_text())
