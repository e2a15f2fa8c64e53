"""README.md and docs/: their Python blocks run under every launcher, and their links lead somewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import manual
import pytest
import torch

from benchmarks.launching import PEERS
from tests.distributed.harness import ROOT, Outcome
from tests.distributed.pages import PAGES, launching_units, units
from tests.distributed.snippets import LAUNCHED, check_weights, in_shell, name_of, write_snippets
from tests.requirements import slow

# These differ from the others in the launcher alone, under which the checks of `jobs` run.
VARIANTS = ("horovodrun --gloo", "mpirun", "torchrun")

PYTHON = f"{PEERS}/bin/python"

Trained = Callable[[str], tuple[Path, list[str], Outcome]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs all snippets under a launcher's command, once; returns the folder, their names and how the job ended."""

    @cache
    def train(command: str) -> tuple[Path, list[str], Outcome]:
        folder = tmp_path_factory.mktemp("snippets")
        names = write_snippets(folder, with_plain_loop=LAUNCHED[command] == 1)
        return folder, names, in_shell(folder, command)

    return train


@pytest.mark.parametrize("command", [slow(name) if name.startswith(VARIANTS) else name for name in LAUNCHED])
def test_snippets_run_under_every_launcher(trained: Trained, command: str) -> None:
    folder, names, outcome = trained(command)
    assert outcome.code == 0, outcome.output
    assert "trainer: WARNING" not in outcome.output
    check_weights(folder, names, LAUNCHED[command])


def test_columns_that_are_cut_by_hand_train_as_one_process_does(trained: Trained) -> None:
    (columns,) = [unit for unit in units("python") if "columns[:, run.rank :: run.world_size]" in unit.text]
    weights = []
    for command in ("python train.py", "horovodrun -np 2 python train.py"):
        folder, _, outcome = trained(command)
        assert outcome.code == 0, outcome.output
        weights.append(json.loads((folder / "snippets" / f"{name_of(columns)}.0").read_text()))
    one, two = (torch.cat([torch.tensor(value).flatten() for value in values]) for values in weights)
    assert (one - two).norm() < 1e-5 * one.norm()


# What stands before and behind each recipe of docs/recipes.md.
CHECKED = [
    ("", "assert 3 <= epoch < 99 and run.all_gather(epoch) == [epoch, epoch]"),
    ("", "assert len(test) == len(predictions) and (predictions - model(test.inputs)).norm() < 1e-5"),
    (
        """
class Linear(torch.nn.Linear):
    def forward(self, rows):
        if len(rows) > 100 * (run.rank + 1):
            raise torch.OutOfMemoryError("a GPU's")
        return super().forward(rows)
model.__class__ = Linear
""",
        "assert (size, len(loader)) == (64, 8)",
    ),
    (
        "import os; os.environ['SLURM_ARRAY_TASK_ID'] = '5'",
        "assert (optimizer.param_groups[0]['lr'], len(loader), checkpoints.config.folder) == (0.2, 10, 'runs/sweep/5')",
    ),
]


def recipes_of(containing: str = "") -> list[str]:
    blocks = [unit.text for unit in units("python") if unit.page == "docs/recipes.md"]
    return [text for text in blocks if containing in text]


def test_each_recipe_does_what_it_says(tmp_path: Path) -> None:
    common, *recipes = [text for text in recipes_of() if not re.search("^import (optuna|hydra)|omegaconf", text, re.M)]
    scripts = [
        "\n".join([common, before, recipe, check]) for recipe, (before, check) in zip(recipes, CHECKED, strict=True)
    ]
    (tmp_path / "train.py").write_text("".join(f"exec({script!r}, {{}})\n" for script in scripts) + "print('all')")
    outcome = in_shell(tmp_path, "horovodrun -np 2 python train.py")
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("all") == 2
    assert "trainer: WARNING" not in outcome.output


@pytest.mark.needs("peers")
@pytest.mark.slow
def test_a_sweep_launches_its_trials(tmp_path: Path) -> None:
    function, _, _ = launching_units()[0].text.partition("if __name__")
    [sweep] = recipes_of("import optuna")
    told = "    print([trial.state.name for trial in study.trials])"
    (tmp_path / "sweep.py").write_text(f"{function}{sweep.replace('n_trials=20', 'n_trials=1')}\n{told}")
    outcome = in_shell(tmp_path, f"{PYTHON} sweep.py")
    assert "['COMPLETE']" in outcome.output, outcome.output


@pytest.mark.needs("peers")
@pytest.mark.slow
def test_all_ranks_have_one_configuration(tmp_path: Path) -> None:
    given = {"import hydra": "--multirun rate=0.1,0.2", "OmegaConf.from_cli": "rate=0.3"}
    for containing, options in given.items():
        script = [recipes_of()[0], *recipes_of(containing)]
        if "hydra" not in containing:
            script.append('run.print(f"rate {config.rate}, precision {run.config.precision}")')
        (tmp_path / "train.py").write_text("\n".join(script))
        outcome = in_shell(tmp_path, f"horovodrun -np 2 {PYTHON} train.py {options} init.precision=bf16")
        assert outcome.code == 0, outcome.output
        assert ",".join(re.findall("rate (.*), precision bf16", outcome.output)) == options.partition("=")[2]
    assert len(list(tmp_path.rglob("*.yaml"))) == 7, "one folder for both ranks"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        file, _, heading = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)", target.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in headings], link


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<script src="https://unpkg.com/iframe-worker/shim">', "https://unpkg.com/iframe-worker/shim"),
        ("<img alt=x src=//a.org/b.png>", "//a.org/b.png"),
        ('<link rel="stylesheet" href="http://a.org/b.css">', "http://a.org/b.css"),
        ("@font-face { src: url('https://a.org/b.woff') }", "https://a.org/b.woff"),
        ('<pre class="x mermaid">', 'class="x mermaid'),
        ('<a href="https://a.org">a</a><script src="./a.js"></script><code>wget https://a.org</code>', ""),
    ],
)
def test_the_site_has_all_that_it_loads(text: str, found: str) -> None:
    """`make docs` ends with an error otherwise."""
    assert manual.loaded_from_elsewhere(text) == found


def test_the_site_shows_a_notebook_as_one_reads_it() -> None:
    shown = manual._show(ROOT / "examples" / "notebook.ipynb")
    assert shown.startswith("# MNIST on two processes")
    assert "````python\nresults = trainer.launch(train, epochs, np=2)\n````" in shown
    assert "cell_type" not in shown


@pytest.mark.parametrize(
    "words",
    ["mixed precision", "early stopping", "out of memory", "profiling", "deadlock", "reproducible", "multi-node"],
)
def test_words_that_people_search_for_are_in_the_manual(words: str) -> None:
    assert any(words in " ".join((ROOT / page).read_text().lower().split()) for page in PAGES)
