"""Why a login fails, from the error messages of ssh, and what disturbs one that works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

from trainer.ops.doctor.checks.names import bridge, correction, into_bridge
from trainer.ops.doctor.facts import Facts, Login, Name
from trainer.ops.doctor.finding import About, Cause, Finding
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
            yield _failed(facts, host.name, login)
        else:
            yield from _disturbed(facts, host, login)


def _disturbed(facts: Facts, host: Host, login: Login) -> Iterator[Finding]:
    name, about = host.name, About(Cause.LOGIN, host.name)
    if login.in_small_segments and not any(name in ends and pair.large for ends, pair in facts.pairs.items()):
        yield About(Cause.MTU, name).problem(
            f"large packets between {facts.here} and {name} get lost (login hangs)",
            f"`ping -M do -s 1472 {name}` on {facts.here}, with smaller numbers until it answers; set the MTU to 28 "
            "more on both hosts: `sudo ip link set dev INTERFACE mtu MTU`",
        )
    if login.printed:
        yield about.problem(
            f"the login shell on {name} prints {login.printed[:60]!r} before the output of a command, which launchers "
            "take for the command's",
            f"in ~/.bashrc on {name}, put `[[ $- == *i* ]] || return` above what prints",
        )
    if login.seconds > SLOW_S and not host.is_here:
        yield about.warning(
            f"the login to {name} takes {login.seconds:.0f} s",
            f"look at ~/.bashrc on {name}; in /etc/ssh/sshd_config there, set `UseDNS no` and `GSSAPIAuthentication "
            "no`",
        )


def _failed(facts: Facts, host: str, login: Login) -> Finding:
    here, seen = facts.here, facts.names_here.get(host, Name())
    if "Could not resolve hostname" in login.error:
        return About(Cause.NAME, host).problem(
            f"{here} cannot resolve the name {host}",
            f"add its address to /etc/hosts on {here}, or correct the name in -H",
        )
    last = login.error.splitlines()[-1].strip()
    # What ssh connects to: the address in its settings, else what the name leads to, else the name.
    address = login.address if login.address not in ("", host) else next(iter(seen.addresses), host)
    if _is_wrong(facts, address, login):
        return About(Cause.NAME, host).problem(
            f"on {here}, {host} leads to {address}, which is {here} itself, and the login fails ({last})",
            correction(here, host, seen),
        )
    if bridge(seen.interface):
        text, remedy = into_bridge(here, host, seen)
        return About(Cause.INTERFACE, host).problem(f"{text}, and the login fails ({last})", remedy)
    words = vars(login) | {"ip": address, "host": host, "here": here, "last": last}
    from_file = " of /etc/hosts" if seen.in_hosts_file and address in seen.addresses else ""
    words["address"] = f"{address}{from_file}, port {login.port}"
    words["known"] = host if login.port == "22" else f"[{host}]:{login.port}"
    for pattern, text, remedy in _REFUSALS:
        if match := re.search(pattern, login.error):
            words |= match.groupdict()
            return About(Cause.LOGIN, host).problem(text.format(**words), remedy.format(**words))
    return About(Cause.AGENT, host).problem(
        f"a command cannot be run on {host}: {last}", f"try `ssh {host} true` on {here}"
    )


def _is_wrong(facts: Facts, address: str, login: Login) -> bool:
    """Return whether the address is this host's own, and not because -H names this host."""
    with suppress(ValueError):  # a name
        if ip_address(address.partition("%")[0]).is_loopback:
            return True
    return address in facts.own_addresses and re.search("host key|HOST IDENTIFICATION", login.error, re.I) is not None
