"""On which addresses the launcher listens: on those that its ranks are told."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from horovod.runner.http.http_server import RendezvousServer, Server
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


def test_a_port_that_is_taken_on_one_address_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = Server.server_bind
    tried: list[Any] = []
    with socket.create_server((SECOND, 0)) as taken:
        port = taken.getsockname()[1]

        def bind_there_first(self: Any) -> None:
            if not tried:
                self.server_address = (self.server_address[0], port)
            tried.append(self.server_address)
            bind(self)

        monkeypatch.setattr(Server, "server_bind", bind_there_first)
        server = RendezvousServer([], [FIRST, SECOND])
        server.stop()
    assert tried[:2] == [(FIRST, port), (SECOND, port)]
    assert server.port != port


def test_an_address_of_another_host_is_said_at_once() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        RendezvousServer([], ["192.0.2.1"])
