"""Why a login fails, from the error messages of ssh, and what disturbs a login that works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

from trainer.ops.doctor.checks.network import correction, into_bridge, is_bridge
from trainer.ops.doctor.facts import Facts, HostFacts
from trainer.ops.doctor.finding import About, Cause, Finding

SLOW_S = 5.0
_REFUSALS = (
    (
        r"UNPROTECTED PRIVATE KEY FILE",
        "other users can read the private key {identityfile} on {here}, and ssh refuses it",
        "`chmod 600 {identityfile}` on {here}",
    ),
    (
        r"Bad owner or permissions on (?P<file>\S+)",
        "ssh refuses its settings on {here}: others can write {file}",
        "`chmod go-w {file}` on {here}",
    ),
    (
        r"IDENTIFICATION HAS CHANGED|host key .*has changed",
        "{host} ({address}) shows another host key than the one that {here} knows",
        "if {host} was set up anew, `ssh-keygen -f {userknownhostsfile} -R '{known}'` on {here}, and log in once",
    ),
    (
        r"Host key verification failed|host key is known",
        "{host} ({address}) shows a host key that {here} does not know",
        "compare it and log in once: `ssh {host}` on {here}",
    ),
    (
        r"Permission denied",
        "{host} ({address}) refuses the login of user {user} with the key {identityfile}",
        "`ssh-copy-id {user}@{host}`; where the key is there already, `chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys` on "
        "{host}, and the owner has to be {user}",
    ),
    (
        r"Connection refused",
        "no ssh server answers on {host} ({address}): connection refused",
        "start it on {host}: `sudo systemctl start ssh`, or name its port in ~/.ssh/config on {here}",
    ),
    (
        r"timed out|No route to host|Network is unreachable",
        "{host} ({address}) does not answer: {last}",
        "see that it runs, and that {ip} is its address; a firewall has to let this port through",
    ),
    (
        r"no answer in time",
        "the login to {host} ({address}) has not ended in {seconds} s",
        "try `ssh {host} true` on {here}; look at ~/.bashrc and ~/.profile on {host} for what waits",
    ),
)
"""What ssh says, the cause and the remedy; in this order, because ssh says several of them at once."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what keeps a job from logging in, or disturbs it."""
    for host in facts.hosts:
        if host.login.error:
            yield _failed(facts, host)
        else:
            yield from _disturbed(facts, host)


def _disturbed(facts: Facts, host: HostFacts) -> Iterator[Finding]:
    login, about = host.login, About(Cause.LOGIN, host)
    if login.printed:
        yield about.problem(
            f"the login shell on {host} prints {login.printed[:60]!r} before the output of a command, which launchers "
            "take for the command's",
            f"in ~/.bashrc on {host}, put `[[ $- == *i* ]] || return` above what prints",
        )
    if login.seconds > SLOW_S and not host.is_here:
        settings = "`UseDNS no` and `GSSAPIAuthentication no`"
        yield about.warning(
            f"the login to {host} takes {login.seconds:.0f} s",
            f"look at ~/.bashrc on {host}; in /etc/ssh/sshd_config there, set {settings}",
        )


def _failed(facts: Facts, host: HostFacts) -> Finding:
    name, here, login, seen = host.name, facts.here, host.login, host.seen_here
    if "Could not resolve hostname" in login.error:
        remedy = f"add its address to /etc/hosts on {here}, or correct the name in -H"
        return About(Cause.NAME, name).problem(f"{here} cannot resolve the name {name}", remedy)
    last = login.error.splitlines()[-1].strip()
    words = dict.fromkeys(("hostname", "user", "identityfile", "userknownhostsfile"), "") | {"port": "22"}
    words |= login.settings
    words["userknownhostsfile"] = words["userknownhostsfile"].partition(" ")[0]  # of several
    # What ssh connects to: the address in its settings, else what the name leads to, else the name.
    address = words["hostname"] if words["hostname"] not in ("", name) else next(iter(seen.addresses), name)
    if _is_wrong(facts, address, login.error):
        text = f"on {here}, {name} leads to {address}, which is {here} itself, and the login fails ({last})"
        return About(Cause.NAME, name).problem(text, correction(here, name, seen))
    if is_bridge(seen.interface):
        text, remedy = into_bridge(here, name, seen)
        return About(Cause.INTERFACE, name).problem(f"{text}, and the login fails ({last})", remedy)
    if login.hangs_in_key_exchange:
        return About(Cause.MTU, name).problem(
            f"large packets between {here} and {name} get lost: the login to {address} hangs in ssh's key exchange",
            f"`ping -M do -s 1472 {name}` on {here}, with smaller numbers until it answers; set the MTU to 28 more on "
            "both hosts: `sudo ip link set dev INTERFACE mtu MTU`",
        )
    from_file = " of /etc/hosts" if seen.in_hosts_file and address in seen.addresses else ""
    words["address"] = f"{address}{from_file}, port {words['port']}"
    words["known"] = name if words["port"] == "22" else f"[{name}]:{words['port']}"
    words |= {"ip": address, "host": name, "here": here, "last": last, "seconds": f"{login.seconds:.0f}"}
    for pattern, text, remedy in _REFUSALS:
        if match := re.search(pattern, login.error):
            words |= match.groupdict()
            return About(Cause.LOGIN, name).problem(text.format(**words), remedy.format(**words))
    text = f"a command cannot be run on {name}: {last}"
    return About(Cause.AGENT, name).problem(text, f"try `ssh {name} true` on {here}")


def _is_wrong(facts: Facts, address: str, error: str) -> bool:
    """Return whether the address is this host's own, and not because -H names this host."""
    with suppress(ValueError):  # a name
        if ip_address(address.partition("%")[0]).is_loopback:
            return True
    return address in facts.own_addresses and re.search("host key|HOST IDENTIFICATION", error, re.I) is not None
