"""Facts about two healthy hosts, a and b, which the tests of `trainer doctor` change."""

from __future__ import annotations

from typing import Any

from trainer.ops.doctor.checks import Facts, HostFacts, judge
from trainer.ops.supervise.hosts import Host

ADDRESS = {"a": "10.0.0.1", "b": "10.0.0.2"}


def way(here: str, there: str, **changes: Any) -> dict[str, Any]:
    """Return what the name of one host leads to on the other."""
    return {"addresses": [ADDRESS[there]], "error": "", "source": ADDRESS[here], "interface": "eth0"} | changes


def healthy() -> Facts:
    """Return the facts of two hosts without a finding."""
    hosts = [HostFacts(host=Host(name, 2), peer=name, login_s=0.1) for name in ADDRESS]
    for host in hosts:
        name = str(host)
        host.answer = {
            "host_name": name,
            "findings": [],
            "gpus": [],
            "software": [["PyTorch", "2.14.1", "install it"], ["Horovod", "0.28.1", ""], ["Open MPI", "4.1.8", ""]],
            "interfaces": [["127.0.0.1", "lo"], [ADDRESS[name], "eth0"]],
            "names": [[other, way(name, other)] for other in ADDRESS],
        }
    pairs = {
        ends: {"address": ADDRESS[ends[1]], "errors": {"40001": "", "20001": ""}, "bytes_per_s": 1e9}
        for ends in (("a", "b"), ("b", "a"))
    }
    return Facts(here="a", hosts=tuple(hosts), own_addresses=["127.0.0.1", ADDRESS["a"]], pairs=pairs)


def the_only(facts: Facts) -> str:
    """Return the one finding there has to be, as it is printed."""
    ((level, line),) = judge(facts)
    assert "; " in line, "no remedy"
    return f"{level}: {line}"
