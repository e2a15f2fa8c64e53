"""When .ci/run tests with containers: where what they test has changed, or where nobody knows."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "containers"


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


def why(folder: Path, **env: str) -> str:
    """Return why .ci/run tests with containers in this checkout."""
    environment = {"PATH": os.environ["PATH"]} | env
    done = subprocess.run([".ci/containers"], cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A branch that is one commit away from origin/main, and changes a page."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "ssh").mkdir()
    (tmp_path / "ssh" / "node.py").touch()
    git(tmp_path, "init", "--initial-branch", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "main")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "a page")
    return tmp_path


def test_where_nothing_that_containers_test_has_changed_they_are_left_out(checkout: Path) -> None:
    assert why(checkout) == ""
    assert why(checkout, TRAINER_CI_BASE="HEAD") == ""
    assert why(checkout, TRAINER_CI="all") == "TRAINER_CI is all"


def test_a_file_of_the_nodes_that_is_changed_made_or_moved_is_a_reason(checkout: Path) -> None:
    (checkout / "ssh" / "new.py").touch()
    assert why(checkout).startswith("ssh/new.py differs from ")
    git(checkout, "mv", "ssh/node.py", "docs/node.py")
    (checkout / "ssh" / "new.py").unlink()
    assert why(checkout).startswith("ssh/node.py differs from ")


def test_where_no_commit_is_known_that_has_passed_everything_runs(checkout: Path) -> None:
    assert why(checkout, TRAINER_CI_BASE="nowhere") == "there is no commit nowhere here"
    git(checkout, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert why(checkout) == "no commit is known that has passed them"
    git(checkout, "update-ref", "-d", "refs/remotes/origin/main")
    assert why(checkout) == "no commit is known that has passed them"
