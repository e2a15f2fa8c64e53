"""The checks of `trainer doctor`: which facts become which finding."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.unit.doctor_facts import (
    ADDRESS,
    changed,
    findings_of,
    healthy,
    login,
    machine,
    software,
    the_only,
    told,
    way,
)
from trainer.ops.doctor.agent.machine import NO_LIMIT
from trainer.ops.doctor.checks.host import GIB, MIB
from trainer.ops.doctor.facts import Facts, Login, Name


def of_machine(name: str = "b", **changes: Any) -> Facts:
    return healthy(machine={"a": machine("a"), "b": machine("b")} | {name: machine(name, **changes)})


def of_software(**changes: Any) -> Facts:
    return healthy(software={"a": software(), "b": software(**changes)})


def of_name(here: str, there: str, **changes: Any) -> Facts:
    facts = healthy()
    names = {host: dict(seen) for host, seen in told(facts, "names").items()}
    names[here][there] = way("a", "b", **changes) if there else Name(**changes)
    return changed(facts, names=names)


def refused(error: str, **changes: Any) -> Facts:
    """Return the facts where ssh to b has ended with these lines."""
    facts = healthy(login={"a": Login(), "b": login(error=error)}, **changes)
    return changed(facts, machine={"a": machine("a")}, software={"a": software()}, pairs={}, names={}, own={})


def test_healthy_hosts_have_no_finding() -> None:
    assert findings_of(healthy(), "train.py") == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            "ssh: connect to host b port 2222: Connection refused",
            "no ssh server answers on b (10.0.0.2, port 2222): connection refused",
        ),
        ("ssh: connect to host b port 2222: Connection timed out", "b (10.0.0.2, port 2222) does not answer: "),
        ("ssh: connect to host b port 2222: No route to host", "b (10.0.0.2, port 2222) does not answer: "),
        (
            "@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.",
            "b (10.0.0.2, port 2222) shows another host key than the one that a knows; if b was set up anew, "
            "`ssh-keygen -f /cluster/known_hosts -R '[b]:2222'` on a",
        ),
        (
            "No ED25519 host key is known for [b]:2222\nHost key verification failed.",
            "b (10.0.0.2, port 2222) shows a host key that a does not know",
        ),
        (
            "trainer@b: Permission denied (publickey).",
            "b (10.0.0.2, port 2222) refuses the login of user trainer with "
            "the key /home/trainer/.ssh/id_ed25519; `ssh-copy-id trainer@b`",
        ),
        (
            "@ WARNING: UNPROTECTED PRIVATE KEY FILE! @\ntrainer@b: Permission denied (publickey).",
            "other users can read the private key /home/trainer/.ssh/id_ed25519 on a, and ssh refuses it; `chmod 600 ",
        ),
        ("Bad owner or permissions on /home/trainer/.ssh/config", "others can write /home/trainer/.ssh/config; `chmod"),
        (
            "ssh: Could not resolve hostname b: Name or service not known",
            "a cannot resolve the name b; add its address to /etc/hosts on a, or",
        ),
        ("no answer in time", "the login to b (10.0.0.2, port 2222) has not ended in 0 s"),
        ("no python3 on the PATH", "a command cannot be run on b: no python3 on the PATH"),
        ("sh: 1: Syntax error", "a command cannot be run on b: sh: 1: Syntax error"),
    ],
)
def test_what_ssh_says_is_the_only_line(error: str, line: str) -> None:
    said = the_only(refused(error))
    assert said.startswith("PROBLEM: ")
    assert line in said


@pytest.mark.parametrize("address", ["127.0.1.1", ADDRESS["a"]])
def test_a_login_that_fails_because_the_name_leads_to_this_host(address: str) -> None:
    seen = Name(addresses=(address,), in_hosts_file=True)
    said = the_only(refused("Host key verification failed.", seen_here={"b": seen}))
    assert f"on a, b leads to {address}, which is a itself" in said
    assert "correct the line of b in /etc/hosts on a" in said


def test_an_address_of_the_hosts_file_is_told_as_such() -> None:
    seen = Name(addresses=("10.9.9.9",), in_hosts_file=True)
    assert "b (10.9.9.9 of /etc/hosts, port 2222) does not answer" in the_only(
        refused("ssh: connect to host b port 2222: Connection timed out", seen_here={"b": seen})
    )


def test_an_address_of_the_settings_of_ssh_is_told_instead() -> None:
    facts = refused("Connection refused", seen_here={"b": Name(addresses=("127.0.1.1",))})
    facts = changed(facts, login={"b": login(error="Connection refused", settings={"hostname": "10.9.9.8"})})
    assert "no ssh server answers on b (10.9.9.8, port 2222)" in the_only(facts)


def test_this_host_by_another_name_may_just_have_no_server() -> None:
    facts = refused("Connection refused", seen_here={"b": Name(addresses=(ADDRESS["a"],))})
    assert "no ssh server answers on b (10.0.0.1, port 2222)" in the_only(facts)


def test_a_login_that_hangs_in_the_key_exchange_is_a_matter_of_large_packets() -> None:
    hanging = login(error="no answer in time", hangs_in_key_exchange=True)
    said = the_only(changed(refused(""), login={"b": hanging}))
    assert "PROBLEM: large packets between a and b get lost: the login to 10.0.0.2 hangs in ssh's key exchange" in said


def test_a_login_that_prints_or_is_slow() -> None:
    assert "prints 'Welcome' before" in the_only(healthy(login={"a": Login(), "b": login(printed="Welcome")}))
    assert the_only(healthy(login={"a": Login(), "b": login(seconds=6.2)})).startswith(
        "WARNING: the login to b takes 6 s"
    )


@pytest.mark.parametrize(
    ("here", "there", "changes", "line"),
    [
        ("a", "b", {"addresses": ("127.0.1.1",)}, "PROBLEM: on a, b leads to 127.0.1.1, which is a itself"),
        (
            "a",
            "b",
            {"addresses": ("10.9.9.9",)},
            "PROBLEM: on a, b leads to 10.9.9.9, and b has no such address (it has 10.0.0.2 on eth0)",
        ),
        (
            "a",
            "b",
            {"addresses": (), "error": "unknown"},
            "PROBLEM: a cannot resolve the name b (unknown); add its address to /etc/hosts on a: `10.0.0.2 b`",
        ),
        ("a", "b", {"addresses": ("fd00::9", "10.0.0.2")}, "WARNING: on a, b leads first to the IPv6 address fd00::9"),
        ("b", "", {"addresses": ("127.0.1.1",)}, "WARNING: on b, its own host name leads to 127.0.1.1"),
    ],
)
def test_names(here: str, there: str, changes: dict[str, Any], line: str) -> None:
    facts = of_name(here, there, **changes)
    assert line in the_only(facts)


def test_this_host_is_told_by_the_name_that_others_have_for_it() -> None:
    facts = of_name("b", "a", addresses=("127.0.0.1",), in_hosts_file=True)
    said = the_only(changed(facts, peer={"a": "login7"}))
    assert said.startswith("PROBLEM: on b, login7 leads to 127.0.0.1, which is b itself")
    assert "correct the line of login7 in /etc/hosts on b: `10.0.0.1 login7`" in said
    nowhere = the_only(changed(of_name("b", "a", addresses=(), error="unknown"), peer={"a": "login7"}))
    assert (
        "b cannot resolve the name login7 (unknown); add its address to /etc/hosts on b: `10.0.0.1 login7`" in nowhere
    )


def test_a_wrong_name_is_corrected_where_it_is_written() -> None:
    for in_hosts_file, place in ((True, "in /etc/hosts on a: `"), (False, "in the DNS, or in /etc/hosts on a: `")):
        facts = of_name("a", "b", addresses=("127.0.1.1",), in_hosts_file=in_hosts_file)
        assert f"correct the line of b {place}10.0.0.2 b`" in the_only(facts)


def test_a_wrong_address_that_is_this_hosts_own_or_behind_a_bridge_is_told_so() -> None:
    facts = of_name("a", "b", addresses=("10.9.9.9",), interface="docker0")
    own = {"a": (ADDRESS["a"], "10.9.9.9"), "b": (ADDRESS["b"],)}
    assert "b leads to 10.9.9.9, which is its own (docker0), and b has no such address" in the_only(
        changed(facts, own=own)
    )


def test_a_host_that_did_not_tell_its_names_has_no_finding_of_them() -> None:
    facts = healthy()
    assert findings_of(changed(facts, names={**told(facts, "names"), "a": {}})) == []


def test_two_hosts_of_one_name() -> None:
    assert "both have the host name 'a'" in the_only(of_machine(host_name="a"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"versions": {"PyTorch": "2.13.0", "CUDA": "12.8"}},
            "PyTorch is 2.14.1 on a and 2.13.0 on b; `pip install torch==2.14.1` on b",
        ),
        ({"versions": {"Horovod": ""}}, "Horovod is 0.28.1 on a and missing on b"),
        ({"versions": {"Open MPI": "5.0.1"}}, "Open MPI is 4.1.8 on a and 5.0.1 on b"),
        ({"versions": {"trainer": "0.2.0"}, "library": "x"}, "trainer is 0.1.0 on a and 0.2.0 on b"),
        ({"library": "x"}, "the code of trainer differs between a and b"),
        ({"horovod_build": "x"}, "WARNING: Horovod 0.28.1 was built differently on a and b"),
        ({"script": "x"}, "the training script differs between a and b"),
        ({"script": "missing"}, "there is no train.py in /job on b"),
        ({"shadows": ["/job/trainer.py"]}, "/job/trainer.py on b is imported in place of the package"),
        ({"orted": "", "path": "/usr/bin"}, "without a terminal finds no orted of Open MPI on its PATH"),
        ({"opal_prefix": "/x", "opal_prefix_is_right": False}, "WARNING: OPAL_PREFIX is /x for a login to b"),
        ({"executable": "/bin/python3", "versions": {"PyTorch": ""}}, f"b has no {sys.executable}, the job's Python"),
    ],
)
def test_software_that_differs(changes: dict[str, Any], line: str) -> None:
    assert line in the_only(of_software(**changes), "train.py")


def test_a_patch_of_python_does_not_matter_and_a_missing_folder_hides_what_is_in_it() -> None:
    assert findings_of(of_software(versions={"Python": "3.11.9"})) == []
    facts = of_machine(folder_exists=False, outputs={"path": "/job", "free": 0, "is_writable": False})
    facts = changed(facts, software={"a": software(), "b": software(script="missing", library="")})
    assert "b has no folder /job" in the_only(facts, "train.py")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"shm_free": 64 * MIB}, "PROBLEM: on b, /dev/shm has 64 MiB free, and its 2 ranks need 128"),
        ({"memory_free": 600 * MIB}, "PROBLEM: on b, the memory limit of its container or cgroup leaves 600 MiB for 2"),
        ({"cores": 1.5}, "WARNING: b has 1.5 of the 2 cores that its ranks need; name fewer slots (-H b:1)"),
        ({"open_files": 256}, "PROBLEM: on b, a process may have 256 open files"),
        ({"has_rdma": True}, "on b, RDMA (/dev/infiniband) needs locked memory, of which a process may have 64 KiB"),
        ({"reads_memory": False}, "WARNING: b refuses process_vm_readv"),
        ({"outputs": {"path": "/job/runs", "free": 30 * MIB, "is_writable": True}}, "/job/runs has 30 MiB free"),
        ({"outputs": {"path": "/job", "free": GIB, "is_writable": False}}, "WARNING: on b, /job cannot be written"),
    ],
)
def test_a_host_that_lacks_something(changes: dict[str, Any], line: str) -> None:
    assert line in the_only(of_machine(**changes))


def test_what_is_not_needed_is_not_missed() -> None:
    assert findings_of(of_machine(reads_memory=False, single_copy_is_off=True)) == []
    assert findings_of(of_machine(has_rdma=True, locked_memory=NO_LIMIT)) == []


@pytest.mark.parametrize(("ahead", "way"), [(3600.5, "ahead of"), (-3600.5, "behind")])
def test_clocks_apart(ahead: float, way: str) -> None:
    assert f"the clock of b is 3,600 s {way} that of a" in the_only(healthy(seconds_ahead={"a": 0.0, "b": ahead}))
    assert findings_of(healthy(seconds_ahead={"a": 0.0, "b": ahead / 3600})) == []
