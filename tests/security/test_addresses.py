"""On which addresses the launcher listens: on those that its ranks are told."""

from __future__ import annotations

import socket
from collections import namedtuple

import psutil
import pytest
from horovod.runner.common.util.network import BasicService, NoValidAddressesFound
from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util import network
from horovod.runner.util.route import LAUNCHER, Interface, RoutedInterfaces

Address = namedtuple("Address", "family address netmask")
KEY = make_secret_key()
FIRST, SECOND, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"


def on(address: str) -> Interface:
    return Interface("eth0", address, "10.0.0.0/8")


def test_a_launcher_on_two_networks_listens_on_both() -> None:
    routes = {
        LAUNCHER: {"here": None, "a": on("10.1.0.1"), "b": on("10.2.0.1"), "c": on("10.1.0.1")},
        **{host: {LAUNCHER: on("10.9.0.1")} for host in ("a", "b", "c")},
        "here": {"a": on("10.1.0.1"), "b": on("10.2.0.1"), "c": on("10.1.0.1")},
    }
    nics = RoutedInterfaces(routes, ["here", "a", "b", "c"])
    assert network.launcher_addresses(nics, "10.1.0.1") == ["10.1.0.1", "10.2.0.1"]
    told = {network.get_driver_ip(nics, host) for host in ("here", "a", "b", "c")}
    assert told == {"10.1.0.1", "10.2.0.1"}


def test_named_interfaces_have_one_address() -> None:
    assert network.launcher_addresses({"lo"}, FIRST) == [FIRST]


def test_one_port_serves_several_addresses_and_no_other() -> None:
    server = RendezvousServer(0, KEY)
    port = server.start(addresses=[FIRST, SECOND])
    server.init([])
    try:
        put_data_into_kvstore(FIRST, port, "scope", "key", 7, KEY)
        assert read_data_from_kvstore(SECOND, port, "scope", "key", KEY) == 7
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((THIRD, port), timeout=5)
    finally:
        server.stop()
    for address in (FIRST, SECOND):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), timeout=5)


def test_a_port_that_is_taken_on_one_address_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((SECOND, 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(network.random, "randrange", lambda *_: port - 1024)
        server = RendezvousServer(0, KEY)
        assert server.start(addresses=[FIRST, SECOND]) != port
        server.stop()


def test_an_address_of_another_host_is_said_at_once() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        RendezvousServer(0, KEY).start(addresses=["192.0.2.1"])


def test_a_service_listens_on_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"one": [Address(socket.AF_INET, FIRST, ""), Address(socket.AF_INET, SECOND, "")],
             "other": [Address(socket.AF_INET, THIRD, "")]}  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    service = BasicService("a service", KEY, ["one"])
    try:
        port = service.get_port()
        assert service.addresses() == {"one": [(FIRST, port), (SECOND, port)]}
        socket.create_connection((SECOND, port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((THIRD, port), timeout=5)
    finally:
        service.shutdown()
    with pytest.raises(NoValidAddressesFound):
        BasicService("a service", KEY, ["none"])
