"""Finds the network interfaces of a job, by asking its hosts for their routes; nothing is started that listens."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from horovod.runner.util import route
from horovod.runner.util.lsf import LSFUtils
from horovod.runner.util.network import resolve_host_address
from horovod.runner.util.remote import get_remote_command
from horovod.runner.util.route import LAUNCHER, Interface, RoutedInterfaces
from horovod.runner.util.threads import execute_function_multithreaded


def get_common_interfaces(settings: Any, all_hosts: Sequence[str], remote_hosts: Collection[str]) -> set[str] | None:
    """Return the names of the interfaces between the job's hosts: the user's, or those that the routes take.

    Args:
        settings: Horovod's.
        all_hosts: names of the job's hosts.
        remote_hosts: those of them that are not this host.

    Returns:
        The loopback interface where all hosts are this one; None under LSF, whose launcher knows by itself.

    Raises:
        RuntimeError: there is no route between two hosts, or a host does not say.
        ValueError: no interface has the loopback address.
    """
    if LSFUtils.using_lsf():
        return None
    if not remote_hosts:
        return loopback_interfaces(settings)
    if settings.nics:
        return set(settings.nics)
    return routed_interfaces(all_hosts, remote_hosts, settings)


def loopback_interfaces(settings: Any) -> set[str]:
    """Return the names of the interfaces with the address 127.0.0.1, of those that the user has named.

    Raises:
        ValueError: there is none.
    """
    loopback = route.own_interfaces().get("127.0.0.1")
    if loopback is None or (settings.nics and loopback.name not in settings.nics):
        raise ValueError("No interface is found for address 127.0.0.1.")
    return {loopback.name}


def routed_interfaces(all_hosts: Sequence[str], remote_hosts: Collection[str], settings: Any) -> set[str]:
    """Ask every host which of its interfaces lead to the other hosts and to the launcher.

    Raises:
        RuntimeError: there is no route between two hosts, or a host does not say.
    """
    addresses = {host: resolve_host_address(host) for host in all_hosts if host in remote_hosts}
    from_here = _checked(LAUNCHER, route.find_routes(addresses))
    # Debian gives a host's own name the address 127.0.1.1, which no interface has.
    to_remote = {host: interface for host, interface in from_here.items() if interface}
    if not to_remote:
        return loopback_interfaces(settings)

    def ask(host: str) -> Mapping[str, Interface | None] | RuntimeError:
        # The launcher's own host may be called localhost, so the others are told its address.
        targets = {other: addresses[other] for other in to_remote if other != host}
        try:
            return _checked(host, _ask_for_routes(host, targets | {LAUNCHER: to_remote[host].address}, settings))
        except RuntimeError as error:
            return error

    routes: dict[str, Mapping[str, Interface | None]] = {LAUNCHER: from_here}
    answers = execute_function_multithreaded(ask, [[host] for host in to_remote])
    for number, host in enumerate(to_remote):
        if isinstance(answers[number], RuntimeError):
            raise answers[number]
        routes[host] = answers[number]
    for local in set(all_hosts) - set(to_remote):
        routes[local] = from_here
        for host in to_remote:
            routes[host] = {**routes[host], local: routes[host][LAUNCHER]}
    return RoutedInterfaces(routes, all_hosts)


def _ask_for_routes(host: str, targets: Mapping[str, str | None], settings: Any) -> dict[str, Interface | str | None]:
    module = [sys.executable, "-m", "horovod.runner.util.route"]
    question = shlex.join([*module, *(f"{name}={address}" for name, address in targets.items())])
    command = get_remote_command(
        shlex.quote(question), host=host, port=settings.ssh_port, identity_file=settings.ssh_identity_file
    )
    try:
        answer = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(10, settings.start_timeout.remaining()),
        )
        return route.parse(answer.stdout)
    except subprocess.TimeoutExpired:
        why = "no answer in time"
    except StopIteration:
        why = (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1]
    raise RuntimeError(f"cannot ask host {host} for its network interfaces: {why}")


def _checked(host: str, routes: Mapping[str, Interface | str | None]) -> dict[str, Interface | None]:
    checked: dict[str, Interface | None] = {}
    for other, interface in routes.items():
        if isinstance(interface, str):
            raise RuntimeError(f"no route from {_spoken(host)} to {_spoken(other)}: {interface}")
        checked[other] = interface
    return checked


def _spoken(host: str) -> str:
    return f"host {host}" if host else f"the launcher ({socket.gethostname()})"
