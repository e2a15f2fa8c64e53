"""A missing requirement is a skip, and in a run that demands everything a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import requirements
from tests.requirements import Requirement


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    requirements.is_present.cache_clear()
    monkeypatch.setattr(
        requirements,
        "REQUIREMENTS",
        {
            "engine": Requirement(lambda: True, "there is no engine"),
            "tool": Requirement(lambda: False, "there is no tool"),
            "gpu": Requirement(lambda: False, "there is no GPU", demanded=False),
        },
    )
    for name in ("CI", "TRAINER_REQUIRE_ALL", "TRAINER_SKIP"):
        monkeypatch.delenv(name, raising=False)
    yield
    requirements.is_present.cache_clear()


@pytest.mark.parametrize("demand", ["", "CI", "TRAINER_REQUIRE_ALL"])
def test_what_is_there_is_used(monkeypatch: pytest.MonkeyPatch, demand: str) -> None:
    if demand:
        monkeypatch.setenv(demand, "1")
    requirements.need("engine")


def test_what_is_missing_is_skipped_with_its_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"^there is no tool$"):
        requirements.need("tool")


@pytest.mark.parametrize("demand", ["CI", "TRAINER_REQUIRE_ALL"])
def test_what_is_missing_fails_a_run_that_demands_everything(monkeypatch: pytest.MonkeyPatch, demand: str) -> None:
    monkeypatch.setenv(demand, "true")
    with pytest.raises(pytest.fail.Exception, match=r"^there is no tool \(this run demands it; TRAINER_SKIP=tool"):
        requirements.need("tool")
    with pytest.raises(pytest.skip.Exception, match=r"^there is no GPU$"):
        requirements.need("gpu")


def test_what_is_named_is_left_out_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("TRAINER_SKIP", "tool, engine")
    for name in ("tool", "engine"):
        with pytest.raises(pytest.skip.Exception, match=f"^TRAINER_SKIP names {name}$"):
            requirements.need(name)


def test_an_unknown_name_ends_the_run() -> None:
    with pytest.raises(pytest.UsageError, match="TRAINER_SKIP has 'tol'; valid are engine, tool, gpu"):
        requirements.skipped({"TRAINER_SKIP": "tol"})
