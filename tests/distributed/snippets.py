"""Runs every snippet of README.md and docs/ as a user's script, under a launcher's command as the pages have it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.distributed.harness import Outcome, run_job
from tests.distributed.pages import Unit, launching_units, units

# What train.py is in these tests: it runs every snippet of the pages as a script, and writes the weights of its model.
RUN_SNIPPETS = """
import json, runpy
from pathlib import Path
import trainer
for snippet in sorted(Path("snippets").glob("*.py")):
    model = runpy.run_path(str(snippet), run_name="__main__")["model"]
    weights = [value.tolist() for value in model.state_dict().values()]
    Path(f"{snippet}.{trainer.current_world().rank}").write_text(json.dumps(weights))
"""
# The launchers' table of README.md, and the ranks that each starts; test_srun.py has the same under Slurm.
LAUNCHED = {
    "python train.py": 1,
    "horovodrun -np 2 python train.py": 2,
    "horovodrun --gloo -np 2 python train.py": 2,
    "mpirun -np 2 --bind-to none python train.py": 2,
    "torchrun --nproc-per-node 2 train.py": 2,
}
RECIPES = "docs/trackers.md"
"""The page whose blocks make a script in pairs, and need the trackers: tests/distributed/test_trackers.py runs them."""
HUGGING_FACE = "docs/hugging-face.md"
"""The page whose script needs transformers: tests/distributed/test_hugging_face.py runs it."""
_IN_SHELL = "import os, sys; os.chdir(sys.argv[1]); os.execvp('bash', ['bash', '-c', sys.argv[2]])"

PLAIN_LOOP = """\
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(1010, 20), torch.randint(3, (1010,)))
model = torch.nn.Linear(20, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(dataset, batch_size=100, shuffle=True)
for epoch in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
"""


def name_of(unit: Unit) -> str:
    """Return the name of a snippet's file."""
    return f"{unit.page.replace('/', '-')}-{unit.line}.py"


def write_snippets(folder: Path, *, with_plain_loop: bool = False) -> list[str]:
    """Write train.py and all snippets, the diffs applied to the plain loop, into `folder`; return their names."""
    (folder / "snippets").mkdir(parents=True)
    (folder / "train.py").write_text(RUN_SNIPPETS)
    snippets = {name_of(unit): unit.text for unit in _scripts("python")}
    snippets |= {f"diff-{unit.line}.py": apply_diff(unit.text, PLAIN_LOOP) for unit in _scripts("diff")}
    if with_plain_loop:
        snippets["plain.py"] = PLAIN_LOOP
    for name, text in snippets.items():
        (folder / "snippets" / name).write_text(text)
    return list(snippets)


def _scripts(kind: str) -> list[Unit]:
    """Return the blocks that are scripts which train; those of some pages have tests of their own."""
    # What docs/coming-from-*.md show are parts of files, which test_coming_from.py runs.
    is_elsewhere = ("docs/coming-from-", "docs/recipes.md", RECIPES, HUGGING_FACE)
    return [unit for unit in units(kind) if not unit.page.startswith(is_elsewhere) and unit not in launching_units()]


def check_weights(folder: Path, snippets: Sequence[str], ranks: int) -> None:
    """Check that every snippet has run on all ranks and ended with the same weights on each."""
    for name in snippets:
        by_rank = [json.loads((folder / f"snippets/{name}.{rank}").read_text()) for rank in range(ranks)]
        assert by_rank.count(by_rank[0]) == len(by_rank), f"{name} ends with other weights on another rank"


def in_shell(folder: Path, command: str, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a command in `folder` as a user would type it."""
    root_may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **root_may, **(env or {})}
    return run_job("python", 1, ["-c", _IN_SHELL, str(folder), command], env=env)


def apply_diff(diff: str, script: str) -> str:
    """Return `script` with the hunks of a diff applied, which "…" separates.

    Raises:
        ValueError: a hunk's old lines are not in the script exactly once.
    """
    for hunk in diff.split("\n …\n"):
        lines = hunk.split("\n")
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        if script.count(old) != 1:
            raise ValueError(f"these lines are {script.count(old)} times in the plain loop:\n{old}")
        script = script.replace(old, new)
    return script
