"""The way in: ssh's own words, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

from trainer.ops.doctor.checks.names import bridge, bridge_remedy, correction, into_bridge
from trainer.ops.doctor.facts import Facts, Login, Name
from trainer.ops.doctor.finding import Cause, Finding, problem, warning
from trainer.ops.supervise.hosts import Host

SLOW_S = 5.0
# In this order, because ssh says several of them at once.
_REFUSALS = (
    (r"UNPROTECTED PRIVATE KEY FILE", "other users can read the private key {key} on {here}, and ssh refuses it",
     "`chmod 600 {key}` on {here}"),
    (r"Bad owner or permissions on (?P<file>\S+)", "ssh refuses its settings on {here}: others can write {file}",
     "`chmod go-w {file}` on {here}"),
    (r"IDENTIFICATION HAS CHANGED|host key .*has changed", "{host} ({address}) shows another host key than the one "
     "that {here} knows", "if {host} was set up anew, `ssh-keygen -f {known_hosts} -R '{known}'` on {here}, and "
     "log in once"),
    (r"Host key verification failed|host key is known", "{host} ({address}) shows a host key that {here} does not "
     "know", "compare it and log in once: `ssh {host}` on {here}"),
    (r"Permission denied", "{host} ({address}) refuses the login of user {user} with the key {key}",
     "`ssh-copy-id {user}@{host}`; where the key is there already, `chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys` on "
     "{host}, and the owner has to be {user}"),
    (r"Connection refused", "no ssh server answers on {host} ({address}): connection refused",
     "start it on {host}: `sudo systemctl start ssh`, or name its port in ~/.ssh/config on {here}"),
    (r"timed out|No route to host|Network is unreachable", "{host} ({address}) does not answer: {last}",
     "see that it runs, and that {ip} is its address; a firewall has to let this port through"),
    (r"Connection (closed|reset)|kex_exchange_identification", "{host} ({address}) ends the connection before the "
     "login", "look at sshd's log on {host}: `sudo journalctl -u ssh -n 20`"),
    (r"no answer in time", "the login to {host} ({address}) has not ended in {seconds:.0f} s",
     "try `ssh {host} true` on {here}; look at ~/.bashrc and ~/.profile on {host} for what waits"),
    (r"no python3 on the PATH", "{host} has no Python on the PATH of a login without a terminal",
     "install the job's environment on {host}"),
)  # fmt: skip


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what keeps a job from logging in, or disturbs it."""
    for host in facts.hosts:
        login = facts.logins.get(host.name, Login())
        if login.error:
            yield _failed(facts, host, login)
            continue
        if login.in_small_segments and not any(host.name in ends and pair.large for ends, pair in facts.pairs.items()):
            yield problem(
                Cause.MTU, (host.name,), f"large packets between {facts.here} and {host.name} get lost (login hangs)",
                f"`ping -M do -s 1472 {host.name}` on {facts.here}, with smaller numbers until it answers; set the MTU "
                "to 28 more on both hosts: `sudo ip link set dev INTERFACE mtu MTU`",
            )  # fmt: skip
        if login.printed:
            yield problem(
                Cause.LOGIN, (host.name,),
                f"the login shell on {host.name} prints {login.printed[:60]!r} before the output of a command, which "
                "launchers take for the command's",
                f"in ~/.bashrc on {host.name}, put `[[ $- == *i* ]] || return` above what prints",
            )  # fmt: skip
        if login.seconds > SLOW_S and not host.is_here:
            yield warning(
                Cause.LOGIN, (host.name,), f"the login to {host.name} takes {login.seconds:.0f} s",
                f"look at ~/.bashrc on {host.name}; in /etc/ssh/sshd_config there, set `UseDNS no` and "
                "`GSSAPIAuthentication no`",
            )  # fmt: skip


def _failed(facts: Facts, host: Host, login: Login) -> Finding:
    seen = facts.names_here.get(host.name, Name())
    if "Could not resolve hostname" in login.error:
        return problem(
            Cause.NAME, (host.name,), f"{facts.here} cannot resolve the name {host.name}",
            f"add its address to /etc/hosts on {facts.here}, or correct the name in -H",
        )  # fmt: skip
    last = login.error.splitlines()[-1].strip()
    address = _address(host, login, seen)
    if _is_wrong(facts, address, login):
        return problem(
            Cause.NAME, (host.name,),
            f"on {facts.here}, {host.name} leads to {address}, which is {facts.here} itself, and the login fails "
            f"({last})", correction(facts.here, host.name, seen),
        )  # fmt: skip
    if bridge(seen.interface):
        return problem(
            Cause.INTERFACE, (host.name,), f"{into_bridge(facts.here, host.name, seen)}, and the login fails ({last})",
            bridge_remedy(facts.here, host.name, seen),
        )  # fmt: skip
    is_from_file = seen.in_hosts_file and address in seen.addresses
    words = {
        "ip": address, "host": host.name, "here": facts.here, "user": login.user, "key": login.key, "last": last,
        "address": f"{address}{' of /etc/hosts' if is_from_file else ''}, port {login.port}",
        "seconds": login.seconds, "known_hosts": login.known_hosts,
        "known": host.name if login.port == "22" else f"[{host.name}]:{login.port}",
    }  # fmt: skip
    for pattern, text, remedy in _REFUSALS:
        if match := re.search(pattern, login.error):
            words |= match.groupdict()
            return problem(Cause.LOGIN, (host.name,), text.format(**words), remedy.format(**words))
    return problem(
        Cause.AGENT, (host.name,), f"a command cannot be run on {host.name}: {last}",
        f"try `ssh {host.name} true` on {facts.here}",
    )  # fmt: skip


def _address(host: Host, login: Login, seen: Name) -> str:
    """Return the address that ssh connects to, or the name where it has none."""
    if login.address not in ("", host.name):
        return login.address
    return next(iter(seen.addresses), host.name)


def _is_wrong(facts: Facts, address: str, login: Login) -> bool:
    """Return whether the address is this host's own, and not because -H names this host."""
    with suppress(ValueError):  # a name
        if ip_address(address.partition("%")[0]).is_loopback:
            return True
    return address in facts.own_addresses and re.search("host key|HOST IDENTIFICATION", login.error, re.I) is not None
