"""Launching: starts contestants through their launchers, in a clean environment."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import measuring
from benchmarks.two_hosts import horovodrun_on_both, torchrun_on_both
from measuring import Finished

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"
"""Where scripts/install/peers.py installs Lightning Fabric, Accelerate and the trackers."""
# The user's settings, which would change what "default settings" means.
_USER_SETTINGS = ("HOROVOD_", "OMPI_MCA_", "MALLOC_", "OMP_", "MKL_")


def run(
    command: Sequence[str], *, timeout_s: float, threads: int | None = None, variables: Mapping[str, str] | None = None
) -> Finished:
    """Run `command` in the project's root, without the tuning that this process's environment may hold.

    Args:
        threads: OMP_NUM_THREADS for every rank; None leaves the choice to the contestant.
        variables: what its environment has beside.
    """
    return measuring.run(command, env=_environment(threads) | dict(variables or {}), timeout_s=timeout_s, cwd=ROOT)


def launch(script: str, ranks: int, launcher: str = "horovodrun", *, on_two_hosts: bool = False) -> list[str]:
    """Return the command that starts `script` on so many ranks; one rank of Horovod needs no launcher.

    Args:
        on_two_hosts: half of the ranks are on each of the hosts of two_hosts.py, in place of all on this one.
    """
    if launcher in ("torchrun", "peers"):
        of_peers = [str(PEERS / "bin/python"), "-m", "torch.distributed.run"]
        torchrun = of_peers if launcher == "peers" else ["torchrun"]
        if on_two_hosts:
            first, second = (shlex.join(one) for one in torchrun_on_both(ranks // 2, torchrun))
            both = f'{second} "$@" & other=$!; {first} "$@"; code=$?; wait $other && exit $code'
            return ["sh", "-c", both, "sh", script]  # a caller adds the script's options
        # Standalone takes a free port; the default port may be taken by another torchrun on this host.
        return [*torchrun, "--standalone", "--nproc-per-node", str(ranks), script]
    if on_two_hosts:
        return [*horovodrun_on_both(ranks // 2), sys.executable, script]
    if ranks == 1:
        return [sys.executable, script]
    return ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable, script]


def has_peers() -> bool:
    """Return whether the libraries that we compare with are installed."""
    return (PEERS / "bin/python").exists() and (PEERS / "trainer-peers.sha256").exists()


def on_one_core(command: Sequence[str]) -> list[str]:
    """Return `command` bound to the first core that this process may use."""
    if shutil.which("taskset") is None:
        return list(command)
    return ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]


def _environment(threads: int | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_USER_SETTINGS)}
    kept["CUDA_VISIBLE_DEVICES"] = ""
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    return kept
