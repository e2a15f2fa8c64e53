"""Causes of failures for `trainer doctor`: how each is made on two nodes and undone, and what the first line says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.docker.cluster import ROOT, Cluster, succeed

Place = Literal["shell", "user", "net", "mount", "uts", "machine"]


@dataclass(frozen=True)
class Step:
    """A script, and the script that undoes it.

    They run on the node as root ("shell") or as its user, in one of the node's namespaces ("net", "mount", "uts") with
    this machine's programs, or on this machine.
    `{a}` and `{b}` stand for the nodes' addresses, `{process}` for the node's first process,
    `{root}` for the checkout.
    """

    place: Place
    node: str
    do: str = ""
    undo: str = ""


@dataclass(frozen=True)
class Cause:
    """Something that goes wrong."""

    group: str
    title: str
    steps: tuple[Step, ...]
    first_line: str
    """A regular expression that the first line has to match."""
    level: Literal["PROBLEM", "WARNING"] = "PROBLEM"
    hosts: str = "a:2,b:2"
    node: str = "a"
    command: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    """Node b's in compose, for which it is made anew."""


class Nodes(Cluster):
    """Nodes a and b, on which causes are made.

    Args:
        project: of compose.
        folder: for a file of compose.
    """

    def __init__(self, project: str, folder: Path) -> None:
        self._file = folder / "nodes.yaml"
        super().__init__(project, "docker-compose.yml", str(self._file))

    def start(self, settings: Mapping[str, object]) -> None:
        """Start the nodes, node b with these settings of compose, unless they run so."""
        # Causes are made in files of the nodes, which can be written here as in a container that nobody has hardened.
        common = "stop_grace_period: 1s, read_only: false, tmpfs: !reset []"
        node_b = "".join(f", {name}: {json.dumps(value)}" for name, value in settings.items())
        text = f"services:\n  a: {{{common}}}\n  b: {{{common}{node_b}}}\n"
        if not self._file.exists() or self._file.read_text() != text:
            self._file.write_text(text)
            self.up()

    @contextmanager
    def made(self, cause: Cause) -> Iterator[None]:
        """Make the cause, and undo it afterwards."""
        self.start(cause.settings)
        done: list[Step] = []
        try:
            for step in cause.steps:
                done.append(step)
                self._run(step, step.do)
            yield
        finally:
            for step in reversed(done):
                self._run(step, step.undo)

    def _run(self, step: Step, script: str) -> None:
        container, process = self.container(step.node), self._inspect(step.node, "{{.State.Pid}}")
        words = {node: self._inspect(node, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}") for node in "ab"}
        script = script.format(**words, process=process, root=ROOT)
        command = {
            "shell": ["docker", "exec", "--user", "0", container],
            "user": ["docker", "exec", "--user", "1000", container],
            "machine": [],
        }.get(step.place, ["nsenter", "--target", process, f"--{step.place}"])
        if script:
            succeed([*command, "sh", "-ec", script])

    def _inspect(self, node: str, form: str) -> str:
        return succeed(["docker", "inspect", "--format", form, self.container(node)]).strip()


def hosts_line(node: str, *lines: str) -> Step:
    """Return the step that puts lines into a node's /etc/hosts, before all others."""
    text = "".join(f"{line}\\n" for line in lines)
    change = f"cp /etc/hosts /tmp/hosts.old; {{{{ printf '{text}'; cat /tmp/hosts.old; }}}} > /tmp/hosts.new; "
    return Step("shell", node, change + "cat /tmp/hosts.new > /etc/hosts", "cat /tmp/hosts.old > /etc/hosts")


def bashrc(line: str) -> Step:
    """Return the step that puts a line at the top of node b's .bashrc, which sshd's shell reads."""
    change = f"cp ~/.bashrc /tmp/bashrc.old; {{{{ echo '{line}'; cat /tmp/bashrc.old; }}}} > ~/.bashrc"
    return Step("user", "b", change, "cp /tmp/bashrc.old ~/.bashrc")


def firewall(node: str, rule: str) -> Step:
    """Return the step that adds a rule to a node's firewall."""
    return Step("net", node, f"iptables -A {rule}", f"iptables -D {rule}")


def moved(path: str) -> Step:
    """Return the step that takes a file or folder away on node b."""
    return Step("shell", "b", f"mv {path} {path}.away", f"mv {path}.away {path}")


def edited(path: str, change: str) -> Step:
    """Return the step that edits a file on node b with sed."""
    file = f"f=$(echo {path})"
    return Step("shell", "b", f"{file}; cp -p $f $f.old; sed -i '{change}' $f", f"{file}; mv $f.old $f")


_FOREIGN = "192.0.2.9"
"""An address of the network for documentation, which no host has."""
_TRAIN = ("python", "examples/mnist.py")
_PEER = "$(nsenter -t {process} -n ip -o link show eth0 | sed 's/.*@if\\([0-9]*\\):.*/\\1/')"
"""The number, on this machine, of the interface that stands behind a node's own."""


def _middle(mtu: int) -> str:
    name = f'$(ip -o link | sed -n "s/^{_PEER}: \\([^@:]*\\).*/\\1/p")'
    return f"ip link set dev {name} mtu {mtu}"


def _offloads(node: str) -> Step:
    command = "python3 {root}/benchmarks/segment_offload.py eth0"
    return Step("net", node, f"{command} off", f"{command} on")


_SYN_IN, _SYN_OUT = "INPUT -p tcp --syn ! --dport 2222", "OUTPUT -p tcp --syn ! --dport 2222 ! -o lo"

NETWORK = (
    Cause("network", "b's firewall drops new connections, ssh excepted", (firewall("b", f"{_SYN_IN} -j DROP"),),
          r"a cannot connect to b \(.*: timed out\): a firewall"),
    Cause("network", "b's firewall drops ports from 32768 up",
          (firewall("b", "INPUT -p tcp --syn --dport 32768: -j DROP"),),
          r"a cannot connect to b \(.* port \d{5}: timed out, but port \d+ answers\)"),
    Cause("network", "b's firewall drops what b begins", (firewall("b", f"{_SYN_OUT} -j DROP"),),
          r"b cannot connect to a \(.*: timed out\): a firewall"),
    Cause("network", "an MTU of 1200 in the middle, without ICMP",
          (_offloads("a"), _offloads("b"), Step("machine", "b", _middle(1200), _middle(1500))),
          r"large packets between a and b get lost: the login to \S+ hangs in ssh's key exchange"),
    Cause("network", "a bridge docker0 on b has a's subnet",
          (Step("net", "b", "ip link add docker0 type bridge; ip link set docker0 up; "
                "ip addr add 10.250.250.1/32 dev docker0; ip route add {a}/32 dev docker0", "ip link del docker0"),),
          r"the way from b to a \(.*\) leads into docker0, a bridge to containers on b, and the login fails",
          hosts="b:2,a:2", node="b"),
    Cause("network", "b sends 20 Mbit/s",
          (Step("net", "b", "tc qdisc add dev eth0 root tbf rate 20mbit burst 32kbit latency 400ms",
                "tc qdisc del dev eth0 root"),),
          r"from b to a come \d+ Mbit/s", level="WARNING"),
)  # fmt: skip

NAMES = (
    Cause("names", "a's /etc/hosts: b is 127.0.1.1", (hosts_line("a", "127.0.1.1 b"),),
          r"on a, b leads to 127\.0\.1\.1, which is a itself.*/etc/hosts on a"),
    Cause("names", "b's /etc/hosts: a is an address that nobody has", (hosts_line("b", f"{_FOREIGN} a"),),
          rf"on b, a leads to {_FOREIGN}, through eth0, and a has no such address"),
    Cause("names", "b's host name is a", (Step("uts", "b", "hostname a", "hostname b"),),
          r"a and b both have the host name 'a'"),
    Cause("names", "b has no name server", (Step("shell", "b", "cp /etc/resolv.conf /tmp/r; : > /etc/resolv.conf",
          "cat /tmp/r > /etc/resolv.conf"),), r"b cannot resolve the name a"),
    Cause("names", "-H names a host that does not exist", (), r"a cannot resolve the name c", hosts="a:2,c:2"),
)  # fmt: skip

LOGIN = (
    Cause("ssh", "b refuses the port", (firewall("b", "INPUT -p tcp --dport 2222 -j REJECT --reject-with tcp-reset"),),
          r"no ssh server answers on b \(.*port 2222\): connection refused"),
    Cause("ssh", "b's host key has changed",
          (Step("user", "a", "cd /cluster; cp known_hosts /tmp/k; sed -i \"s|^\\(.b.:2222\\).*|\\1 $(cut -d' ' -f1,2 "
                "nodes/a/ssh_host_ed25519_key.pub)|\" known_hosts", "cat /tmp/k > /cluster/known_hosts"),),
          r"b \(.*\) shows another host key than the one that a knows"),
    Cause("ssh", "the key is not among b's", (Step("user", "b", "mv ~/.ssh/authorized_keys /tmp/",
          "mv /tmp/authorized_keys ~/.ssh/"),), r"b \(.*\) refuses the login of user trainer .*ssh-copy-id"),
    Cause("ssh", "others can read a's private key", (Step("user", "a", "chmod 644 ~/.ssh/id_ed25519",
          "chmod 600 ~/.ssh/id_ed25519"),), r"other users can read the private key \S*id_ed25519 on a"),
    Cause("ssh", "b's .bashrc prints", (bashrc("echo Welcome to b"),), r"login shell on b prints 'Welcome to b'"),
    Cause("ssh", "b's .bashrc waits", (bashrc("sleep 30"),), r"the login to b \(.*\) has not ended in 9 s"),
)  # fmt: skip

_SITE = "/opt/venv/lib/python3.*/site-packages"
VERSIONS = (
    Cause("versions", "another PyTorch on b", (edited(f"{_SITE}/torch-*.dist-info/METADATA",
          "s/^Version: .*/Version: 2.13.0/"),), r"PyTorch is 2\.15\.\S+ on a and 2\.13\.0 on b"),
    Cause("versions", "other code of the library on b", (Step("shell", "b", "echo >> /trainer/trainer/run.py",
          "sed -i '$d' /trainer/trainer/run.py"),), r"the code of trainer is \w{12} on a and \w{12} on b"),
    Cause("versions", "no training script on b", (moved("/trainer/examples/mnist.py"),),
          r"there is no examples/mnist\.py in /trainer on b", command=_TRAIN),
    Cause("versions", "a trainer.py beside the script on b", (Step("shell", "b", "touch /trainer/examples/trainer.py",
          "rm /trainer/examples/trainer.py"),), r"examples/trainer\.py on b is imported in place of", command=_TRAIN),
    Cause("versions", "a PATH without Open MPI on b", (bashrc("export PATH=/usr/bin:/bin"),),
          r"a login to b without a terminal finds no orted of Open MPI on its PATH \(/usr/bin:/bin\)"),
    Cause("versions", "another Python on b", (Step("shell", "b", "cd /opt/venv/bin; for p in python*; "
          "do mv $p x-$p; done", "cd /opt/venv/bin; for p in x-python*; do mv $p ${{p#x-}}; done"),),
          r"b has no /opt/venv/bin/python\S*, the job's Python"),
)  # fmt: skip

HOST = (
    Cause("host", "--shm-size 64m on b", (),
          r"on b, /dev/shm has 6\d MiB free, and its 2 ranks need 128", settings={"shm_size": "64m"}),
    Cause("host", "a memory limit of 800 MB on b", (),
          r"on b, the memory limit of its container leaves \d+ MiB for 2 ranks",
          settings={"mem_limit": "800m"}),
    Cause("host", "--cpus 1 for b's two ranks", (),
          r"b has 1 of the 2 cores that its ranks need", settings={"cpus": 1}, level="WARNING"),
    Cause("host", "32 MB for checkpoints on b", (Step("mount", "b", "mount -t tmpfs -o size=32m,mode=777 tmpfs "
          "/trainer/runs", "umount /trainer/runs"),), r"on b, the disk of /trainer/runs has 3[12] MiB free"),
    Cause("host", "b's folder for checkpoints belongs to root", (Step("mount", "b", "mount -t tmpfs -o mode=755 tmpfs "
          "/trainer/runs", "umount /trainer/runs"),), r"on b, /trainer/runs cannot be written by user trainer",
          level="WARNING"),
)  # fmt: skip

CAUSES = (*NETWORK, *NAMES, *LOGIN, *VERSIONS, *HOST)
