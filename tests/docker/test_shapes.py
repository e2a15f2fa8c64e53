"""The mission's own commands: 1 and 2 machines with 1 and 2 processes each, through every launcher."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.docker.cluster import Cluster, Outcome, data_dir, succeed

WHO = """
import socket, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((2**20,), float(hvd.rank())), op=hvd.Sum)
assert total.unique().tolist() == [sum(range(hvd.size()))], total
print(f"who {socket.gethostname()} {hvd.rank()} of {hvd.size()}", flush=True)
"""
SHAPES = {"1x1": (1, "a:1"), "1x2": (2, "a:2"), "2x1": (2, "a:1,b:1"), "2x2": (4, "a:2,b:2")}
# What a user should never have to scroll past.
_NOISE = re.compile(r"warning|Read -1|Permanently added|authenticity|deprecat|error", re.IGNORECASE)


def ranks_per_host(outcome: Outcome) -> Counter[str]:
    """Counted from what the ranks themselves said."""
    return Counter(host for host, _ in re.findall(r"who (\w+) (\d+) of", outcome.output))


def expected(shape: str) -> Counter[str]:
    """Ranks per host as `-H` gives them."""
    return Counter({host: int(slots) for host, slots in re.findall(r"(\w):(\d)", SHAPES[shape][1])})


def assert_quiet(outcome: Outcome) -> None:
    """It worked, and said nothing that looks like a problem."""
    assert outcome.code == 0, outcome.output
    assert not (noise := [line for line in outcome.output.splitlines() if _NOISE.search(line)]), noise


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
def test_horovodrun_starts_the_ranks_where_it_was_told(cluster: Cluster, shape: str, controller: str) -> None:
    ranks, hosts = SHAPES[shape]
    outcome = cluster.run("a", "horovodrun", controller, "-np", str(ranks), "-H", hosts, "python", "-c", WHO)
    assert_quiet(outcome)
    assert ranks_per_host(outcome) == expected(shape)


def test_horovodrun_from_the_other_node(cluster: Cluster) -> None:
    outcome = cluster.run("b", "horovodrun", "-np", "4", "-H", "a:2,b:2", "python", "-c", WHO)
    assert_quiet(outcome)
    assert ranks_per_host(outcome) == expected("2x2")


def test_mpirun(cluster: Cluster) -> None:
    outcome = cluster.run("a", "mpirun", "-np", "4", "-H", "a:2,b:2", "--bind-to", "none", "python", "-c", WHO)
    assert_quiet(outcome)
    assert ranks_per_host(outcome) == expected("2x2")


# On the shapes between, ranks start above.
@pytest.mark.parametrize(
    "shape", ["1x1", *[pytest.param(shape, marks=pytest.mark.slow) for shape in ("1x2", "2x1")], "2x2"]
)
def test_mnist_trains_on_every_shape(cluster: Cluster, shape: str) -> None:
    ranks, hosts = SHAPES[shape]
    real = data_dir() is not None
    dataset = ["--dataset", "mnist", "--target-accuracy", "97"] if real else ["--dataset", "digits"]
    outcome = cluster.run(
        *["a", "horovodrun", "-np", str(ranks), "-H", hosts, "python", "examples/mnist.py", "--epochs", "1", *dataset],
        timeout_s=240,
    )
    assert_quiet(outcome)
    places = hosts.replace(":", ": ").replace(",", ", ")
    assert (f"{ranks} ranks on {places}; " if ranks > 1 else "rank 0 of 1 on a ") in outcome.output


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_node_can_write_its_volumes_and_memory_only(cluster: Cluster, node: str) -> None:
    """The other tests of this file show that what the mission's commands need is there."""
    settings = json.loads(succeed(["docker", "inspect", cluster.container(node)]))[0]["HostConfig"]
    assert settings["ReadonlyRootfs"]
    assert set(settings["Tmpfs"]) == {"/tmp", "/run", "/home/trainer"}  # noqa: S108 (in the container)
    assert settings["PidsLimit"] == 8192
    assert settings["CapDrop"] == ["ALL"]
    assert not settings["CapAdd"]
    assert settings["SecurityOpt"] == ["no-new-privileges:true"]
    status = cluster.shell(node, "cat /proc/self/status")
    assert re.findall(r"^Cap(?:Prm|Eff|Bnd):\s*0+$", status, re.MULTILINE), status
    assert "NoNewPrivs:\t1\n" in status
    for folder in ("/trainer", "/opt/venv", "/etc", "/usr/local/bin", "/var/tmp"):  # noqa: S108
        assert "Read-only file system" in cluster.shell(node, f"touch {folder}/written 2>&1")
    assert cluster.shell(node, "for i in /tmp ~ runs /cluster; do touch $i/written && rm $i/written; done 2>&1") == ""
    # Debian 13 gives new users' folders to them alone.
    assert re.fullmatch(r"1777 root\n7(55|00) trainer\n", cluster.shell(node, "stat --format '%a %U' /tmp ~"))
