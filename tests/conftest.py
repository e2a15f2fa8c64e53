"""Requirements of tests, and checks that no test leaves something behind for the next one."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from tests import requirements

ROOT = Path(__file__).resolve().parent.parent
# What the library or its launchers set. PyTorch, scikit-learn and pytest have variables of their own.
_OURS = (
    *("HOROVOD_", "OMPI_", "OPAL_", "PMIX_", "OMP_", "MALLOC_", "RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "MASTER_"),
    "TRAINER_",
)
_CACHES = {".git", ".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}
# Python's multiprocessing keeps this process for the rest of the interpreter's life.
_LASTING = "multiprocessing.resource_tracker"
_END_TIMEOUT_S = 5.0


def pytest_configure() -> None:
    requirements.skipped()  # an unknown name ends the run here
    # A shell has what it starts in the background ignore SIGINT, and so would all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # there are as many workers as cores, or more


class _JobScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist's schedulers have no types
    """`--dist loadfile`, with each job of test_every_strategy.py by itself: it runs once, for all of its checks.

    So does each test of some files that take long, and whose tests share nothing.
    """

    def _split_scope(self, nodeid: str) -> str:
        job = re.search(r"/test_every_strategy\.py::\w+\[(.+?)(?:-check_\w+)?\]$", nodeid)
        alone = re.search(r"/test_(checkpoints|failures|hangs|launch|libraries|supervise)\.py::", nodeid)
        return job[1] if job else nodeid if alone else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _JobScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            requirements.need(name)


@pytest.fixture(autouse=True)
def _restored_process() -> Iterator[None]:
    """Joining a job sets threads and the exception hook; many a test draws random numbers."""
    threads, state, hook = torch.get_num_threads(), torch.random.get_rng_state(), sys.excepthook
    yield
    sys.excepthook = hook
    torch.random.set_rng_state(state)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    changed = {
        name
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name) and name.startswith(_OURS)
    }
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = {thread.ident for thread in threading.enumerate()}
    yield
    left = [t.name for t in threading.enumerate() if t.ident not in before and not t.daemon]
    assert not left, f"the test left threads running: {left}"


@pytest.fixture(autouse=True)
def _same_files() -> Iterator[None]:
    before = _files()
    yield
    left = sorted(_files() - before)
    assert not left, f"the test left files in the checkout: {left}"


def _files() -> set[str]:
    """Names in the checkout's root and in runs/, where a training leaves its record by default."""
    runs = ROOT / "runs"
    names = {path.name for path in ROOT.iterdir()} - _CACHES
    return names | ({f"runs/{path.name}" for path in runs.iterdir()} if runs.is_dir() else set())


@pytest.fixture(autouse=True)
def _same_children() -> Iterator[None]:
    before = _children()
    yield
    _, left = psutil.wait_procs(_children() - before, timeout=_END_TIMEOUT_S)
    named = [" ".join(process.cmdline())[-200:] for process in left]
    for process in left:
        process.kill()
    assert not named, f"the test left processes running: {named}"


def _children() -> set[psutil.Process]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # most tests have none, and psutil looks at every process of the machine
        return set()
    return {process for process in psutil.Process().children() if _is_running(process)}


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and _LASTING not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
