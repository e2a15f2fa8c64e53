"""The checks of `trainer doctor` between hosts: which facts about the network become which finding."""

from __future__ import annotations

from typing import Any

from tests.unit.doctor_facts import findings_of, healthy, machine, pair, the_only, told, way
from trainer.ops.doctor.facts import Facts, HostFacts
from trainer.ops.doctor.finding import Level


def lost(there: dict[str, str], back: dict[str, str], **changes: Any) -> Facts:
    pairs = {("a", "b"): pair("b", errors=there), ("b", "a"): pair("a", errors=back)}
    return healthy(pairs=pairs, **changes)


WELL = {"40001": "", "20001": ""}
LOST = {"40001": "timed out", "20001": "timed out"}


def test_a_firewall_in_one_direction_both_or_on_some_ports() -> None:
    one_way = the_only(lost(LOST, WELL))
    assert "a cannot connect to b (10.0.0.2 port 40001: timed out), while b connects to a" in one_way
    assert "on b, let all TCP from 10.0.0.1 through: `sudo iptables -I INPUT -p tcp -s 10.0.0.1 -j ACCEPT`" in one_way
    other_way = the_only(lost(WELL, LOST))
    assert "b cannot connect to a" in other_way
    assert "on a, let all TCP from 10.0.0.2 through" in other_way
    both = the_only(lost(LOST, LOST))
    assert (
        "(10.0.0.2 port 40001: timed out, and 10.0.0.1 port 40001: timed out), though ssh works: a firewall; " in both
    )
    assert both.startswith("PROBLEM: a and b cannot connect to each other ")
    assert "port 20001: connection refused, but port 40001 answers" in the_only(
        lost({"40001": "", "20001": "connection refused"}, WELL)
    )


def test_a_tunnel_on_the_way() -> None:
    names = {**told(healthy(), "names"), "b": {"a": way("b", "a", interface="wg0")}}
    assert the_only(healthy(names=names)).startswith("WARNING: the way from b to a leads through the tunnel wg0")


def test_two_hosts_with_one_address_on_a_bridge() -> None:
    interfaces = {
        name: {**entry, "docker0": {"addresses": ["172.17.0.1"], "mtu": 1500}}
        for name, entry in told(healthy(), "interfaces").items()
    }
    said = the_only(healthy(interfaces=interfaces))
    assert said.startswith("WARNING: a and b both have the address 172.17.0.1 (on docker0 and docker0)")
    assert "btl_tcp_if_include eth0`" in said


def test_an_address_of_many_hosts_is_one_line() -> None:
    bridge = {"docker0": {"addresses": ["172.17.0.1"], "mtu": 1500}}
    facts = healthy(interfaces=dict.fromkeys("abc", bridge))
    facts.hosts += (HostFacts(name="c", slots=2, machine=machine("c"), interfaces=bridge),)
    (said,) = [finding for finding in findings_of(facts) if "172.17.0.1" in finding.text]
    assert said.text.startswith("a, b and c all have the address 172.17.0.1 (on docker0, docker0 and docker0)")


def test_large_packets_that_vanish() -> None:
    pairs = {("a", "b"): pair("b"), ("b", "a"): pair("a", loses_large=True)}
    said = the_only(healthy(pairs=pairs))
    assert "large packets from a to b get lost (the MTU of eth0 is 1500, and less gets through)" in said
    back = {("a", "b"): pair("b", loses_large=True), ("b", "a"): pair("a", loses_large=True)}
    assert "large packets from b to a get lost" in the_only(healthy(pairs=back))


def test_a_pair_of_which_one_direction_could_not_be_tried_has_no_finding_of_it() -> None:
    assert findings_of(healthy(pairs={("a", "b"): pair("b", errors=LOST)})) == []


def test_a_slow_pair() -> None:
    slow = {("a", "b"): pair("b", bytes_per_s=5e6), ("b", "a"): pair("a", bytes_per_s=None)}
    assert "WARNING: from b to a come 40 Mbit/s; " in the_only(healthy(pairs=slow))


def test_problems_come_before_warnings_and_causes_before_what_they_explain() -> None:
    wrong = {
        **told(healthy(), "names"),
        "a": {**told(healthy(), "names")["a"], "b": way("a", "b", addresses=("127.0.1.1",))},
    }
    facts = lost(
        LOST,
        {},
        names=wrong,
        seconds_ahead={"a": 0.0, "b": 9.0},
        machine={"a": machine("a"), "b": machine("b", shm_free=0)},
    )
    findings = findings_of(facts)
    assert [finding.level for finding in findings] == [Level.PROBLEM, Level.PROBLEM, Level.WARNING]
    assert "b leads to 127.0.1.1" in str(findings[0])
    assert "has 0 MiB free, and its 2 ranks need 128" in str(findings[1])
