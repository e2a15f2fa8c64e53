"""On which addresses the launcher listens: on those that its ranks are told."""

from __future__ import annotations

import socket

import pytest
from horovod.runner.util import route
from horovod.runner.util.route import LAUNCHER, Interface, RoutedInterfaces, Routes

from tests.security.stores import started

FIRST, SECOND, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"


def on(address: str) -> Interface:
    return Interface("eth0", address, "10.0.0.0/8")


def test_a_launcher_on_two_networks_listens_on_both() -> None:
    routes: Routes = {
        LAUNCHER: {"here": None, "a": on("10.1.0.1"), "b": on("10.2.0.1"), "c": on("10.1.0.1")},
        **{host: {LAUNCHER: on("10.9.0.1")} for host in ("a", "b", "c")},
        "here": {"a": on("10.1.0.1"), "b": on("10.2.0.1"), "c": on("10.1.0.1")},
    }
    nics = RoutedInterfaces(routes, ["here", "a", "b", "c"])
    assert route.launcher_addresses(nics) == ["10.1.0.1", "10.2.0.1"]
    told = {route.launcher_address(nics, host) for host in ("here", "a", "b", "c")}
    assert told == {"10.1.0.1", "10.2.0.1"}


def test_named_interfaces_have_one_address() -> None:
    assert route.launcher_addresses({"lo", "no-such-0"}) == [FIRST]
    with pytest.raises(RuntimeError, match="Cannot find an IPv4 address of the common interface"):
        route.launcher_addresses({"no-such-0"})


def test_one_port_serves_several_addresses_and_no_other() -> None:
    with started([FIRST, SECOND]) as store:
        assert store.serves(SECOND)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((THIRD, store.port), timeout=5)
    for address in (FIRST, SECOND):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=5)
