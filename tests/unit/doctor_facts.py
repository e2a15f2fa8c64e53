"""Facts about two healthy hosts, and changes to them."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Any

from trainer.ops.doctor.agent.machine import NO_LIMIT
from trainer.ops.doctor.checks import judge
from trainer.ops.doctor.checks.host import GIB
from trainer.ops.doctor.facts import Facts, HostFacts, Login, Name, Pair
from trainer.ops.doctor.finding import Finding, Level

ADDRESS = {"a": "10.0.0.1", "b": "10.0.0.2"}
_OF_HOSTS = {field.name for field in fields(HostFacts)}


def machine(name: str, **changes: Any) -> dict[str, Any]:
    """Return what an agent reads of a healthy host."""
    return {
        "host_name": name,
        "user": "trainer",
        "shm_free": GIB,
        "memory_free": NO_LIMIT,
        "cores": 2.0,
        "open_files": 1024,
        "locked_memory": 65536,
        "has_rdma": False,
        "folder": "/job",
        "folder_exists": True,
        "outputs": {"path": "/job/runs", "free": 20 * GIB, "is_writable": True},
        "reads_memory": True,
        "single_copy_is_off": False,
    } | changes


def software(**changes: Any) -> dict[str, Any]:
    """Return what an agent reads of the right packages; `versions` are merged."""
    versions = {
        "Python": "3.11.2",
        "PyTorch": "2.14.1",
        "Horovod": "0.28.1",
        "Open MPI": "4.1.8",
        "trainer": "0.1.0",
        "CUDA": "13.0",
    } | changes.pop("versions", {})
    return {
        "executable": sys.executable,
        "versions": versions,
        "horovod_build": "h",
        "library": "l",
        "script": "s",
        "shadows": [],
        "orted": "/bin/orted",
        "path": "/bin",
        "opal_prefix": "",
        "opal_prefix_is_right": True,
    } | changes


def way(here: str, there: str, **changes: Any) -> Name:
    """Return what the name of one host leads to on the other."""
    return replace(Name(addresses=(ADDRESS[there],), source=ADDRESS[here], interface="eth0"), **changes)


def pair(there: str, **changes: Any) -> Pair:
    """Return an exchange that went well."""
    whole = Pair(address=ADDRESS[there], errors={"40001": "", "20001": ""}, latency_s=1e-4, bytes_per_s=1e9)
    return replace(whole, **changes)


def healthy(**changes: Any) -> Facts:
    """Return the facts of a cluster without a finding, with changes as `changed` takes them."""
    hosts = tuple(
        HostFacts(
            name=name,
            slots=2,
            peer=name,
            login=login() if name == "b" else Login(seconds=0.1),
            seen_here=way("a", name),
            machine=machine(name),
            software=software(),
            interfaces={
                "lo": {"addresses": ["127.0.0.1"], "mtu": 65536},
                "eth0": {"addresses": [address], "mtu": 1500},
            },
            names={"": way(name, name), **{other: way(name, other) for other in ADDRESS}},
            own=("127.0.0.1", address),
        )
        for name, address in ADDRESS.items()
    )
    pairs = {("a", "b"): pair("b"), ("b", "a"): pair("a")}
    facts = Facts(hosts=hosts, here="a", own_addresses=frozenset({ADDRESS["a"]}), pairs=pairs)
    return changed(facts, **changes)


def changed(facts: Facts, **changes: Any) -> Facts:
    """Return facts with other values of its fields, or of its hosts' fields, which are given by host.

    A host that is not named has told nothing.
    """
    by_field = {field: changes.pop(field) for field in _OF_HOSTS & changes.keys()}
    hosts = []
    for host in facts.hosts:
        empty = HostFacts(name=host.name, slots=host.slots, peer=host.name)
        values_of_host = {field: values.get(host.name, getattr(empty, field)) for field, values in by_field.items()}
        hosts.append(replace(host, **values_of_host))
    return replace(facts, hosts=tuple(hosts), **changes)


def told(facts: Facts, field: str) -> dict[str, Any]:
    """Return a field of all hosts."""
    return {host.name: getattr(host, field) for host in facts.hosts}


def login(**changes: Any) -> Login:
    """Return how ssh got to b."""
    settings = {
        "user": "trainer",
        "hostname": "b",
        "port": "2222",
        "identityfile": "/home/trainer/.ssh/id_ed25519",
        "userknownhostsfile": "/cluster/known_hosts /etc/ssh/known_hosts",
    }
    settings |= changes.pop("settings", {})
    return replace(Login(seconds=0.3, settings=settings), **changes)


def findings_of(facts: Facts, script: str = "") -> list[Finding]:
    """Return the findings of `trainer doctor -H a:2,b:2 python SCRIPT`."""
    return judge(replace(facts, script=script))


def the_only(facts: Facts, script: str = "") -> str:
    """Return the one finding there has to be, as it is printed, with its level."""
    (finding,) = findings_of(facts, script)
    assert finding.remedy
    return f"{Level(finding.level).name}: {finding}"
