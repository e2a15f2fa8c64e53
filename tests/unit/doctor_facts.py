"""Facts about two healthy hosts, and changes to them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from trainer.ops.doctor.agent.machine import NO_LIMIT
from trainer.ops.doctor.checks import judge
from trainer.ops.doctor.checks.host import GIB
from trainer.ops.doctor.facts import Facts, Login, Name, Pair
from trainer.ops.doctor.finding import Finding, Level
from trainer.ops.supervise.hosts import Host

HOSTS = (Host("a", 2), Host("b", 2))
ADDRESS = {"a": "10.0.0.1", "b": "10.0.0.2"}


def machine(name: str, **changes: Any) -> dict[str, Any]:
    """Return what an agent reads of a healthy host."""
    return {
        "host_name": name, "user": "trainer", "user_id": 1000, "identity": f"kernel of {name}", "shm_free": GIB,
        "memory_free": {"machine": 8 * GIB, "cgroup": NO_LIMIT}, "cores": 2.0, "open_files": 1024,
        "locked_memory": 65536, "has_rdma": False, "folder": "/job", "folder_exists": True,
        "outputs": {"path": "/job/runs", "free": 20 * GIB, "is_writable": True}, "reads_memory": True,
        "single_copy_is_off": False,
    } | changes  # fmt: skip


def software(**changes: Any) -> dict[str, Any]:
    """Return what an agent reads of the right packages; `versions` are merged."""
    versions = {
        "Python": "3.11.2", "PyTorch": "2.14.1", "Horovod": "0.28.1", "Open MPI": "4.1.8", "trainer": "0.1.0",
        "CUDA": "13.0", "NCCL": "2.30.7",
    } | changes.pop("versions", {})  # fmt: skip
    return {
        "executable": sys.executable, "versions": versions, "horovod_build": "h", "library": "l", "script": "s",
        "shadows": [], "programs": {"orted": "/bin/orted", "mpirun": "/bin/mpirun", "horovodrun": "/bin/horovodrun"},
        "path": "/bin", "opal_prefix": "", "opal_prefix_is_right": True,
    } | changes  # fmt: skip


def way(here: str, there: str, **changes: Any) -> Name:
    """Return what the name of one host leads to on the other."""
    return replace(Name(addresses=(ADDRESS[there],), own=ADDRESS[here], interface="eth0"), **changes)


def pair(there: str, **changes: Any) -> Pair:
    """Return an exchange that went well."""
    whole = Pair(address=ADDRESS[there], errors={40001: "", 20001: ""}, latency_s=1e-4, bytes_per_s=1e9)
    return replace(whole, **changes)


def healthy(**changes: Any) -> Facts:
    """Return the facts of a cluster without a finding."""
    facts = Facts(
        hosts=HOSTS, here="a",
        logins={"a": Login(seconds=0.1), "b": login()},
        names_here={"a": way("a", "a"), "b": way("a", "b")}, own_addresses=frozenset({ADDRESS["a"]}),
        machines={name: machine(name) for name in ADDRESS}, software={name: software() for name in ADDRESS},
        interfaces={
            name: {"lo": {"addresses": ["127.0.0.1"], "mtu": 65536, "speed": 0},
                   "eth0": {"addresses": [address], "mtu": 1500, "speed": 10_000}}
            for name, address in ADDRESS.items()
        },
        names={"a": {"": way("a", "a"), "a": way("a", "a"), "b": way("a", "b")},
               "b": {"": way("b", "b"), "a": way("b", "a"), "b": way("b", "b")}},
        owned={name: {address: True} for name, address in ADDRESS.items()},
        pairs={("a", "b"): pair("b"), ("b", "a"): pair("a")}, clocks={"a": 0.0, "b": 0.01},
    )  # fmt: skip
    return replace(facts, **changes)


def login(**changes: Any) -> Login:
    """Return how ssh got to b."""
    return replace(
        Login(
            seconds=0.3, user="trainer", address="b", port="2222", key="/home/trainer/.ssh/id_ed25519",
            known_hosts="/cluster/known_hosts",
        ), **changes
    )  # fmt: skip


def found(facts: Facts, script: str = "") -> list[Finding]:
    """Return the findings of `trainer doctor -H a:2,b:2 python SCRIPT`."""
    return judge(replace(facts, script=script))


def the_only(facts: Facts, script: str = "") -> str:
    """Return the one finding there has to be, as it is printed, with its level."""
    (finding,) = found(facts, script)
    assert finding.remedy
    return f"{Level(finding.level).name}: {finding}"
