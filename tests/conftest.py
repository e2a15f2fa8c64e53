"""No test leaves environment variables, threads or the seed of torch behind for the next one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

# What the library or its launchers set. PyTorch, scikit-learn and pytest have variables of their own.
_OURS = ("HOROVOD_", "OMPI_", "OPAL_", "PMIX_", "OMP_", "MALLOC_", "RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "MASTER_")


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    environment = dict(os.environ)
    threads = {thread.ident for thread in threading.enumerate()}
    threads_before = torch.get_num_threads()
    state = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(state)
    torch.set_num_threads(threads_before)
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name.startswith(_OURS)
    }
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    left = [t.name for t in threading.enumerate() if t.ident not in threads and not t.daemon]
    assert not left, f"the test left threads running: {left}"
