"""README.md and docs/: every command and snippet has a check, and those that need no container are run here."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.documentation import ELSEWHERE, HERE, LAUNCHED, VARIANTS, claimed, claims
from tests.distributed.harness import ROOT, Outcome
from tests.distributed.pages import IS_COMMAND, PAGES, read_page, units
from tests.distributed.snippets import check_weights, in_shell, name_of, write_snippets
from trainer import FsdpConfig, ShardedLoader, StreamLoader, TrainerConfig
from trainer.data.base import OPTIONS, Loader
from trainer.strategies import NAMES

_FOLDERS = "trainer|scripts|tests|examples|benchmarks|third_party|docs|ssh|requirements"


def test_every_block_and_command_has_exactly_one_check() -> None:
    assert [str(unit) for unit in units() if claims(unit) != 1] == []


def test_every_check_belongs_to_a_command_of_the_pages() -> None:
    assert claimed() - {unit.text for unit in units("command")} == set()


def test_pictures_in_text_hide_no_command() -> None:
    assert [
        str(unit) for unit in units("text") for line in unit.text.split("\n") if IS_COMMAND.match(line.strip())
    ] == []


def test_blocks_are_found_in_every_form() -> None:
    page = (
        "See `make a` and `word`, or `make\nb c`.\n\n    make d   # why\n    make e | \\\n        make f\n\n"
        "| `make g` |\n\n```python\nx\n```\n```\ny\n```\n"
    )
    found = [(unit.kind, unit.text) for unit in read_page("page", page)]
    commands = [("command", f"make {rest}") for rest in ("a", "b c", "d", "e | make f", "g")]
    assert found == [*commands, ("python", "x"), ("no language", "y")]
    assert [claims(unit) for unit in read_page("page", page)] == [0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_something_else_runs_is_there(command: str) -> None:
    file, words = ELSEWHERE[command]
    assert words in (ROOT / file).read_text()


def commands(names: Iterable[str], is_slow: Callable[[str], bool]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if is_slow(name) else ()) for name in names]


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


@pytest.mark.parametrize("command", commands(LAUNCHED, VARIANTS.__contains__))
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


@pytest.mark.parametrize("command", commands(HERE, lambda command: HERE[command].is_slow))
def test_commands_run(tmp_path: Path, command: str) -> None:
    for entry in ROOT.iterdir():  # what a command writes by default goes to the folder beside these
        if entry.name not in ("runs", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    outcome = in_shell(tmp_path, HERE[command].small(command))
    assert outcome.code == 0, outcome.output
    assert HERE[command].prints in outcome.output


def test_settings_have_the_documented_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", (ROOT / "docs/trainer.md").read_text(), re.MULTILINE)
    documented = {name: FsdpConfig() if text == "FsdpConfig()" else ast.literal_eval(text) for name, text in rows}
    assert documented == vars(TrainerConfig())


def test_the_layers_are_those_that_the_contract_has() -> None:
    (documented,) = [unit.text for unit in units("text") if unit.page == "docs/architecture.md"]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [one["layers"] for one in contracts if one.get("containers") == ["trainer"]]
    assert documented.splitlines() == layers


def test_strategies_are_all_in_the_table() -> None:
    table = (ROOT / "docs/strategies.md").read_text().split("\n\n")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(NAMES)


def test_a_loaders_arguments_are_all_in_the_table() -> None:
    section = (ROOT / "docs/own-loop.md").read_text().split("## Loaders")[1].split("###")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    takes = {name for kind in (Loader, ShardedLoader, StreamLoader) for name in inspect.signature(kind).parameters}
    by_run = {"is_ready", "dataset", "seed", "accumulate", "world", "on_step", "group", "options"}
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted((takes - by_run) | {*OPTIONS})


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_and_paths_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", text):
        file, _, heading = link.partition("#")
        target = folder / file if file else ROOT / page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)", target.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w-]", "", one.lower().replace(" ", "-")) for one in headings], link
    for path in re.findall(rf"`((?:{_FOLDERS})/[^` ]*)`", text):
        assert list(ROOT.glob(f"{path.rstrip('/')}*")), path


def test_names_in_the_table_of_changes_are_in_the_files_beside_them() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("## Where to change what")[1]
    checked = 0
    for row in table.splitlines():
        places = [ROOT / path for path in re.findall(rf"`((?:{_FOLDERS})/[^` ]*)`", row)]
        files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]
        text = "\n".join(file.read_text() for file in files)
        for name in re.findall(r"`(\w*_\w+|[A-Z]\w*[A-Z]\w*)`", row) if places else ():
            checked += 1
            assert re.search(rf"\b{name}\b", text), f"{name}: {row}"
    assert checked > 10
