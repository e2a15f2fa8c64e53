"""What `trainer doctor` concludes about logins, pairs of hosts, and hosts that differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.doctor_facts import ADDRESS, healthy, the_only, way
from trainer.ops.doctor.call import HANGS, NO_ANSWER
from trainer.ops.doctor.checks import Facts, Way, judge
from trainer.ops.doctor.remote.host import PROBLEM, WARNING

SETTINGS = {
    "user": "trainer",
    "hostname": "b",
    "port": "2222",
    "identityfile": "~/.ssh/key",
    "userknownhostsfile": "/cluster/known_hosts /etc/ssh/known_hosts",
}


def refused(error: str, settings: dict[str, str] = SETTINGS, **seen: Any) -> Facts:
    """Return the facts where ssh to b has ended with these lines."""
    facts = healthy()
    host = facts.hosts[1]
    host.answer, host.login_error, host.settings = {}, error, settings
    host.seen_here = Way(**way("a", "b", **seen))
    return facts


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "a cannot resolve the name b; add its"),
        ("Connection refused", "no ssh server answers on b (10.0.0.2, port 2222): connection refused; start it on b"),
        ("Connection timed out", "b (10.0.0.2, port 2222) does not answer: Connection timed out; see that it runs"),
        ("@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "another host key than the one"),
        ("host key for b has changed", "anew, `ssh-keygen -f /cluster/known_hosts -R '[b]:2222'` on a"),
        ("Host key verification failed.", "b (10.0.0.2, port 2222) shows a host key that a does not know"),
        ("Permission denied (publickey).", "refuses the login of user trainer with the key ~/.ssh/key; `ssh-copy-id t"),
        (
            "@ UNPROTECTED PRIVATE KEY FILE! @\nPermission denied.",
            "other users can read the private key ~/.ssh/key on a",
        ),
        ("Bad owner or permissions on /home/trainer/.ssh/config", "others can write /home/trainer/.ssh/config; `chmod"),
        (HANGS, "large packets between a and b get lost: the login to 10.0.0.2 hangs in ssh's key exchange"),
        (NO_ANSWER, "the login to b (10.0.0.2, port 2222) has not ended in 0 s"),
        ("no python3 on the PATH", "a command cannot be run on b: no python3 on the PATH"),
    ],
)
def test_a_login_that_fails(error: str, line: str) -> None:
    assert line in the_only(refused(error))


@pytest.mark.parametrize("address", ["127.0.1.1", ADDRESS["a"]])
def test_a_login_that_fails_because_the_name_leads_to_this_host(address: str) -> None:
    said = the_only(refused("Host key verification failed.", addresses=[address]))
    assert f"on a, b leads to {address}, which is a itself, and the login fails" in said
    assert "correct the line of b in /etc/hosts on a" in said


def test_a_login_that_fails_because_the_way_leads_into_a_bridge() -> None:
    said = the_only(refused("No route to host", interface="docker0"))
    assert "the way from a to b (10.0.0.2) leads into docker0, a bridge to containers on a, and the login fails" in said


def test_the_address_of_the_settings_of_ssh_is_told_instead() -> None:
    facts = refused("Connection refused", {**SETTINGS, "hostname": "10.9.9.8"}, addresses=["127.0.1.1"])
    assert "no ssh server answers on b (10.9.9.8, port 2222)" in the_only(facts)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"addresses": ["127.0.1.1"]}, "PROBLEM: on a, b leads to 127.0.1.1, which is a itself; correct the line of b"),
        (
            {"addresses": ["10.9.9.9"], "interface": "docker0"},
            "b leads to 10.9.9.9, through docker0, and b has no such",
        ),
        ({"addresses": [], "error": "unknown"}, "PROBLEM: a cannot resolve the name b (unknown); add its address"),
    ],
)
def test_what_a_name_leads_to(changes: dict[str, Any], line: str) -> None:
    facts = healthy()
    facts.hosts[0].answer["names"][1][1].update(changes)
    assert line in the_only(facts)


def test_this_host_is_told_by_the_name_that_others_have_for_it() -> None:
    facts = healthy()
    facts.hosts[0].peer = "login7"
    facts.hosts[1].answer["names"][0] = ["login7", way("b", "a", addresses=["127.0.0.1"])]
    said = the_only(facts)
    assert said.startswith("PROBLEM: on b, login7 leads to 127.0.0.1, which is b itself")
    assert "correct the line of login7 in /etc/hosts on b: `10.0.0.1 login7`" in said


def test_a_host_that_did_not_tell_its_names_has_no_finding_of_them() -> None:
    facts = healthy()
    facts.hosts[0].answer["names"], facts.hosts[1].answer["interfaces"] = [], []
    assert judge(facts) == []


def test_two_hosts_of_one_name() -> None:
    facts = healthy()
    assert judge(facts) == []
    facts.hosts[1].answer["host_name"] = "a"
    assert "a and b both have the host name 'a'" in the_only(facts)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"errors": {"40001": "timed out", "20001": "timed out"}},
            "PROBLEM: a cannot connect to b (10.0.0.2 port 40001: timed out): a firewall; on b, let all TCP from "
            "10.0.0.1 through: `sudo iptables -I INPUT -p tcp -s 10.0.0.1 -j ACCEPT`",
        ),
        ({"errors": {"1": "", "2": "connection refused"}}, "port 2: connection refused, but port 1 answers"),
        ({"large_error": "timed out"}, "PROBLEM: large packets from b to a get lost (timed out); find the size"),
        ({"bytes_per_s": 5e6}, "WARNING: from b to a come 40 Mbit/s; "),
    ],
)
def test_an_exchange_that_goes_wrong(changes: dict[str, Any], line: str) -> None:
    facts = healthy()
    facts.pairs["a", "b"].update(changes)
    assert line in the_only(facts)
    del facts.pairs["b", "a"]
    assert judge(facts) == [], "the other direction was not tried"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"printed": "Welcome"}, "PROBLEM: the login shell on b prints 'Welcome' before"),
        ({"login_s": 6.2}, "WARNING: the login to b takes 6 s"),
        ({"seconds_ahead": 3600.5}, "WARNING: the clock of b is 3,600 s ahead of that of a"),
        ({"seconds_ahead": -3600.5}, "WARNING: the clock of b is 3,600 s behind that of a"),
    ],
)
def test_a_host_that_differs(changes: dict[str, Any], line: str) -> None:
    facts = healthy()
    vars(facts.hosts[1]).update(changes)
    assert line in the_only(facts)


def test_software_that_differs_is_told_by_the_first_difference() -> None:
    facts = healthy()
    software = facts.hosts[1].answer["software"]
    software[1:] = [["Horovod", "", "install it"], ["Open MPI", "5.0.1", ""], ["the training script", "x", ""]]
    assert the_only(facts) == "PROBLEM: Horovod is 0.28.1 on a and missing on b; install it"


WARNED = "b:72:96 [1] misc/shmutils.cc:85 NCCL WARN Error: failed to extend /dev/shm/nccl-x1 to 9637892 bytes\n"
RAISED = "[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:94\n[rank1]: ncclSystemError: failed.\n"


@pytest.mark.parametrize(
    ("tried", "line"),
    [
        ({"wrong": 7}, "an all-reduce over NCCL on GPUs of a and b computes wrong sums; where NCCL_P2P_DISABLE=1"),
        ({"error": NO_ANSWER, "output": ""}, "on GPUs of a and b fails: no answer in time; see NCCL_DEBUG=INFO"),
        ({"error": "x", "output": RAISED + WARNED}, "fails: Error: failed to extend /dev/shm/nccl-x1 to 9637892 bytes"),
        ({"error": "x", "output": RAISED}, "fails: torch.distributed.DistBackendError: NCCL error in: x.cpp:94; see"),
    ],
)
def test_an_all_reduce_that_goes_wrong(tried: dict[str, Any], line: str) -> None:
    facts = healthy()
    facts.all_reduces = [{"hosts": ["b"], "wrong": 0}, {"hosts": ["a", "b"], **tried}]
    assert line in the_only(facts)


def test_problems_come_first_and_what_they_explain_is_left_out() -> None:
    facts = healthy()
    facts.hosts[0].answer["names"][1][1].update(addresses=["127.0.1.1"])
    facts.pairs["a", "b"]["errors"] = {"1": "timed out"}
    facts.hosts[1].seconds_ahead = 9.0
    facts.hosts[1].answer["findings"] = [[WARNING, "its cores; x"], [PROBLEM, "its disk; x"]]
    found = judge(facts)
    assert [level for level, _ in found] == [PROBLEM, PROBLEM, WARNING, WARNING]
    assert "b leads to 127.0.1.1" in found[0][1]
    assert "its disk" in found[1][1]
