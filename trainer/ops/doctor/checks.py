"""What `trainer doctor` concludes from the answers of hosts: failed logins, pairs of hosts, and what differs.

A check yields a level, and the cause with the remedy behind "; ". It stands in a table: `LOGIN_ERRORS`, `PAIR_CHECKS`
or `HOST_CHECKS`; the all-reduce of all hosts is checked after these. What a host can see by itself is checked there, by
`remote/host.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from trainer.ops.doctor.call import HANGS, NO_ANSWER
from trainer.ops.doctor.remote.host import PROBLEM, WARNING
from trainer.ops.supervise.hosts import Host

SLOW_LOGIN_S, MOST_CLOCK_S = 5.0, 2.0
SLOW_BYTES_PER_S = 12.5e6
"""100 Mbit/s: the gradients of a model with 25 million parameters take 8 s a step."""
_BRIDGE = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|lxd|podman|kube")
"""Interfaces that lead to containers and virtual machines of their host."""
Finding = tuple[str, str]
"""A level, and a line."""


@dataclass
class Way:
    """What a name leads to on a host, as `resolve` of `remote/host.py` returns it."""

    addresses: Sequence[str] = ()
    error: str = ""
    source: str = ""
    interface: str = ""


@dataclass(kw_only=True, eq=False)
class HostFacts:
    """What is known of a host. All that its program has not told is empty."""

    host: Host
    peer: str
    """The name by which other hosts know it, which is another one for localhost."""
    login_s: float = 0.0
    login_error: str = ""
    """What ssh has said, and last how it has ended; empty where the program has answered."""
    printed: str = ""
    """What the login shell printed before the command ran."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What `ssh -G` prints for a host whose login fails."""
    seen_here: Way = field(default_factory=Way)
    """What its name leads to on this host, where its login fails."""
    answer: dict[str, Any] = field(default_factory=dict)
    """What `remote/host.py` prints there."""
    seconds_ahead: float = 0.0
    """By which its clock is at least ahead of this host's."""

    def __str__(self) -> str:
        return self.host.name

    def way(self, other: HostFacts) -> Way:
        """Return what the name of another host leads to on this host; an empty `Way` where that is not known."""
        return Way(**dict(self.answer["names"]).get(other.peer, {}))


@dataclass(kw_only=True)
class Facts:
    """All that is known of the hosts and of the ways between them."""

    here: str
    """This host, by its own name."""
    hosts: tuple[HostFacts, ...]
    own_addresses: Collection[str] = ()
    """Those of this host."""
    pairs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """What `try_all` of `remote/exchange.py` returns, by the hosts that connect and listen."""
    all_reduces: list[dict[str, Any]] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    """What could not be looked at."""

    @property
    def answering(self) -> tuple[HostFacts, ...]:
        """Return the hosts that have told about themselves."""
        return tuple(host for host in self.hosts if host.answer)

    def exchange(self, host: HostFacts, other: HostFacts) -> Mapping[str, Any]:
        """Return how a host got bytes from another one; empty unless both directions were tried."""
        ends = str(host), str(other)
        return self.pairs[ends] if {ends, ends[::-1]} <= self.pairs.keys() else {}


def judge(facts: Facts) -> list[Finding]:
    """Return the findings, problems first. Of a pair, a problem leaves out the checks below it, which it explains."""
    findings = [_failed_login(facts, host) for host in facts.hosts if host.login_error]
    for first, second in combinations(facts.answering, 2):
        for pair_check in PAIR_CHECKS:
            found = [*pair_check(facts, first, second), *pair_check(facts, second, first)]
            findings += found
            if any(level == PROBLEM for level, _ in found):
                break
    for host in facts.answering:
        findings += [finding for check in HOST_CHECKS for finding in check(facts, host)]
        findings += [(level, line) for level, line in host.answer["findings"]]
    findings += [finding for tried in facts.all_reduces for finding in _check_all_reduce(tried)]
    return sorted(findings, key=lambda finding: finding[0] != PROBLEM)


LOGIN_ERRORS = {
    r"Could not resolve hostname": "{here} cannot resolve the name {host}; add its address to /etc/hosts on {here}, or "
    "correct the name in -H",
    r"UNPROTECTED PRIVATE KEY FILE": "other users can read the private key {identityfile} on {here}, and ssh refuses "
    "it; `chmod 600 {identityfile}` on {here}",
    r"Bad owner or permissions on (?P<file>\S+)": "ssh refuses its settings on {here}: others can write {file}; "
    "`chmod go-w {file}` on {here}",
    r"IDENTIFICATION HAS CHANGED|host key .*has changed": "{host} ({address}, port {port}) shows another host key than "
    "the one that {here} knows; if {host} was set up anew, `ssh-keygen -f {userknownhostsfile} -R '{known}'` "
    "on {here}, and log in once",
    r"Host key verification failed|host key is known": "{host} ({address}, port {port}) shows a host key that {here} "
    "does not know; compare it and log in once: `ssh {host}` on {here}",
    r"Permission denied": "{host} ({address}, port {port}) refuses the login of user {user} with the key "
    "{identityfile}; `ssh-copy-id {user}@{host}`; where the key is there already, `chmod go-w ~ ~/.ssh "
    "~/.ssh/authorized_keys` on {host}, and the owner has to be {user}",
    r"Connection refused": "no ssh server answers on {host} ({address}, port {port}): connection refused; start it on "
    "{host}: `sudo systemctl start ssh`, or name its port in ~/.ssh/config on {here}",
    r"timed out|No route to host|Network is unreachable": "{host} ({address}, port {port}) does not answer: {last}; "
    "see that it runs, and that {address} is its address; a firewall has to let this port through",
    HANGS: "large packets between {here} and {host} get lost: the login to {address} hangs in ssh's key exchange; find "
    "the size that gets through with `ping -M do -s 1472 {host}`, and set the MTU to 28 more on both",
    NO_ANSWER: "the login to {host} ({address}, port {port}) has not ended in {seconds} s; try `ssh {host} true` on "
    "{here}; look at ~/.bashrc and ~/.profile on {host} for what waits",
    r"": "a command cannot be run on {host}: {last}; try `ssh {host} true` on {here}",
}
"""What ssh says, and the line for it; in this order, because ssh says several of them at once."""


def _failed_login(facts: Facts, host: HostFacts) -> Finding:
    name, here, way, last = host.host.name, facts.here, host.seen_here, host.login_error.splitlines()[-1].strip()
    settings = dict.fromkeys(("hostname", "user", "identityfile", "userknownhostsfile"), "") | {"port": "22"}
    settings |= host.settings
    # What ssh connects to: the address in its settings, else what the name leads to, else the name.
    is_set = settings["hostname"] not in ("", name)
    address = settings["hostname"] if is_set else next(iter(way.addresses), name)
    if address in facts.own_addresses or address.startswith(("127.", "::1")):
        text = f"on {here}, {name} leads to {address}, which is {here} itself"
        return PROBLEM, f"{text}, and the login fails ({last}); {_correction(here, name)}"
    if _BRIDGE.match(way.interface):
        text = f"the way from {here} to {name} ({address}) leads into {way.interface}, a bridge to containers on {here}"
        return PROBLEM, f"{text}, and the login fails ({last}); {_correction(here, name)}"
    words = settings | {"here": here, "host": name, "address": address, "last": last}
    words |= {"seconds": f"{host.login_s:.0f}", "userknownhostsfile": settings["userknownhostsfile"].partition(" ")[0]}
    words["known"] = name if words["port"] == "22" else f"[{host}]:{words['port']}"
    matches = ((re.search(pattern, host.login_error), line) for pattern, line in LOGIN_ERRORS.items())
    return PROBLEM, next(line.format(**words, **match.groupdict()) for match, line in matches if match)


def _check_host_names(facts: Facts, host: HostFacts, other: HostFacts) -> Iterator[Finding]:
    """Launchers tell hosts apart by their host names."""
    name = host.answer["host_name"]
    if name == other.answer["host_name"] and str(host) < str(other):
        text = f"{host} and {other} both have the host name {name!r}, so launchers count their ranks as of one host"
        remedy = f"rename one: `sudo hostnamectl set-hostname {other}`, or --hostname of its container"
        yield PROBLEM, f"{text}; {remedy}; if they are one host, name it once"


def _check_name(facts: Facts, host: HostFacts, other: HostFacts) -> Iterator[Finding]:
    """Ranks connect to what the name of another host leads to."""
    way, name, own = host.way(other), other.peer, dict(other.answer["interfaces"])
    address = next((address for address in way.addresses if ":" not in address), "")
    if way.error:
        text = f"{host} cannot resolve the name {name} ({way.error})"
        yield PROBLEM, f"{text}; add its address to /etc/hosts there, or correct the name in -H"
    elif address.startswith("127."):
        text = f"on {host}, {name} leads to {address}, which is {host} itself"
        yield PROBLEM, f"{text}; {_correction(host, name, other.way(host).source)}"
    elif address and own and address not in own:
        has = ", ".join(f"{address} on {interface}" for address, interface in own.items() if interface != "lo")
        text = f"on {host}, {name} leads to {address}, through {way.interface or 'no interface'}"
        text += f", and {name} has no such address (it has {has})"
        yield PROBLEM, f"{text}; {_correction(host, name, other.way(host).source)}"


def _check_reach(facts: Facts, host: HostFacts, other: HostFacts) -> Iterator[Finding]:
    """Ranks connect in both directions, to ports of several ranges."""
    pair, source = facts.exchange(host, other), host.way(other).source
    refused = {port: error for port, error in pair.get("errors", {}).items() if error}
    if refused:
        answering = next((f", but port {port} answers" for port in pair["errors"] if port not in refused), "")
        port, error = next(iter(refused.items()))
        remedy = f"on {other}, let all TCP from {source} through: `sudo iptables -I INPUT -p tcp -s {source} -j ACCEPT`"
        where = f"{pair['address']} port {port}: {error}{answering}"
        yield PROBLEM, f"{host} cannot connect to {other} ({where}): a firewall; {remedy}"


def _check_large(facts: Facts, host: HostFacts, other: HostFacts) -> Iterator[Finding]:
    """Where small messages arrive and large ones do not, something on the way lets no packet of the MTU through."""
    if error := facts.exchange(host, other).get("large_error"):
        remedy = f"find the size that gets through with `ping -M do -s 1472 {host}`, and set the MTU to 28 more on both"
        yield PROBLEM, f"large packets from {other} to {host} get lost ({error}); {remedy}"


def _check_speed(facts: Facts, host: HostFacts, other: HostFacts) -> Iterator[Finding]:
    """Gradients take this way at every step."""
    rate = facts.exchange(host, other).get("bytes_per_s", SLOW_BYTES_PER_S)
    if rate < SLOW_BYTES_PER_S:
        remedy = f"`ethtool {other.way(host).interface}` on {other}, and `iperf3` between them; see docs/scaling.md"
        yield WARNING, f"from {other} to {host} come {8 * rate / 1e6:.0f} Mbit/s; {remedy}"


PAIR_CHECKS = (_check_host_names, _check_name, _check_reach, _check_large, _check_speed)


def _check_login(facts: Facts, host: HostFacts) -> Iterator[Finding]:
    """Launchers read what a command prints on a host, and wait for its login."""
    if host.printed:
        remedy = "in ~/.bashrc there, put `[[ $- == *i* ]] || return` above what prints"
        text = f"the login shell on {host} prints {host.printed[:60]!r} before the output of a command"
        yield PROBLEM, f"{text}, which launchers take for the command's; {remedy}"
    if host.login_s > SLOW_LOGIN_S and not host.host.is_here:
        remedy = "look at ~/.bashrc there; in /etc/ssh/sshd_config, set `UseDNS no`"
        yield WARNING, f"the login to {host} takes {host.login_s:.0f} s; {remedy}"


def _check_software(facts: Facts, host: HostFacts) -> Iterator[Finding]:
    """All ranks run the same code."""
    first = facts.answering[0]
    known = {title: value for title, value, _ in first.answer["software"]}
    for title, value, remedy in host.answer["software"]:
        there = known.get(title, value)
        if value != there:
            yield PROBLEM, f"{title} is {there or 'missing'} on {first} and {value or 'missing'} on {host}; {remedy}"
            return


def _check_clock(facts: Facts, host: HostFacts) -> Iterator[Finding]:
    """Times in records and certificates are compared between hosts."""
    if abs(host.seconds_ahead) > MOST_CLOCK_S:
        seconds = f"{abs(host.seconds_ahead):,.0f} s {'ahead of' if host.seconds_ahead > 0 else 'behind'}"
        yield WARNING, f"the clock of {host} is {seconds} that of {facts.here}; `sudo timedatectl set-ntp true` there"


HOST_CHECKS = (_check_login, _check_software, _check_clock)


def _check_all_reduce(tried: Mapping[str, Any]) -> Iterator[Finding]:
    """Tell by NCCL's first warning, or the first error of a rank, why an all-reduce fails."""
    where = f"an all-reduce over NCCL on GPUs of {' and '.join(tried['hosts'])}"
    without = "where NCCL_P2P_DISABLE=1 helps, P2P is at fault (IOMMU or ACS, in the firmware)"
    if tried.get("wrong"):
        yield PROBLEM, f"{where} computes wrong sums; {without}"
    elif error := tried.get("error"):
        said = re.search(r"NCCL WARN (.+)", tried["output"]) or re.search(r"([\w.]+Error\b.*)", tried["output"])
        yield PROBLEM, f"{where} fails: {said[1].strip() if said else error}; see NCCL_DEBUG=INFO; {without}"


def _correction(here: object, name: str, right: str = "") -> str:
    return f"correct the line of {name} in /etc/hosts on {here}{f': `{right} {name}`' if right else ', or in the DNS'}"
