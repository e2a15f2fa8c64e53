"""The address that leads to the other hosts: of the user's network, of the launcher's, or of the kernel's route."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from trainer import ConfigError
from trainer.cluster import network
from trainer.cluster.network import (
    address_toward,
    address_toward_master,
    choose_gloo_interface,
    choose_nccl_interface,
    host_id,
)

LAUNCHERS = ("OMPI_MCA_btl_tcp_if_include", "HOROVOD_GLOO_IFACE")
ELSEWHERE = "nowhere.invalid another-boot"


@pytest.fixture(autouse=True)
def _two_interfaces_and_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "MASTER_ADDR", "TRAINER_NETWORK", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    addresses = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)]
        for name, address in (("lo", "127.0.0.1"), ("eth7", "10.1.2.3"), ("eth8", "10.9.9.9"))
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)


def test_ranks_of_one_host_use_the_loopback_address() -> None:
    assert address_toward([host_id(), host_id()]) == "127.0.0.1"


def test_two_machines_of_one_name_are_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "route_to", lambda host: None)
    name = host_id().split()[0]
    with pytest.raises(ConfigError, match=f"leads to {name}; set TRAINER_NETWORK"):
        address_toward([host_id(), f"{name} another-boot"])


def test_without_a_choice_or_a_route_the_error_names_the_hosts() -> None:
    with pytest.raises(ConfigError, match=r"addresses leads to nowhere\.invalid; set TRAINER_NETWORK"):
        address_toward([host_id(), ELSEWHERE])


def test_of_the_launchers_networks_the_first_that_this_host_has_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHERS[0], "203.0.113.0/24,10.1.2.0/24")
    assert address_toward([host_id(), ELSEWHERE]) == "10.1.2.3"
    monkeypatch.setenv(LAUNCHERS[0], "203.0.113.0/24")
    monkeypatch.setenv(LAUNCHERS[1], "eth7")
    assert address_toward([host_id(), ELSEWHERE]) == "10.1.2.3"


def test_the_users_network_counts_before_the_launchers_and_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "route_to", lambda host: "10.1.2.3")
    assert address_toward([host_id(), ELSEWHERE]) == "10.1.2.3"
    monkeypatch.setenv(LAUNCHERS[1], "eth7")
    monkeypatch.setenv("TRAINER_NETWORK", "10.9.0.0/16")
    assert address_toward([host_id(), ELSEWHERE]) == "10.9.9.9"


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("192.168.0.0/16", "has no address there; it has lo 127.0.0.1, eth7 10.1.2.3, eth8 10.9.9.9"),
        ("10.1.2.3", "has no address there"),
        ("10.1.2.0/99", "valid is a network, as in 10.0.0.0/24"),
    ],
)
def test_a_network_that_this_host_does_not_have_is_an_error(
    monkeypatch: pytest.MonkeyPatch, chosen: str, words: str
) -> None:
    monkeypatch.setattr(network, "route_to", lambda host: "10.1.2.3")
    monkeypatch.setenv("TRAINER_NETWORK", chosen)
    with pytest.raises(ConfigError, match=f"TRAINER_NETWORK is '{chosen}'") as caught:
        address_toward([host_id(), ELSEWHERE])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "address", "chosen"),
    [({}, "10.9.9.9", "=eth8"), ({}, "127.0.0.1", None), ({"NCCL_SOCKET_IFNAME": "ib0"}, "10.9.9.9", "ib0")],
)
def test_nccl_takes_this_hosts_own_interface(
    variables: dict[str, str], address: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that it is put back afterwards
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_CONF_FILE", "/none")
    choose_nccl_interface(address)
    assert (os.environ["NCCL_SOCKET_IFNAME"] or None) == chosen


@pytest.mark.parametrize(
    ("address", "told", "chosen"),
    [("127.0.0.1", "", "lo"), ("10.9.9.9", "", "eth8"), (None, "", ""), ("127.0.0.1", "eth7", "eth7")],
)
def test_gloo_listens_on_the_jobs_interface_unless_it_is_told_another(
    address: str | None, told: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", told)
    choose_gloo_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == chosen


@pytest.mark.parametrize(
    ("is_one_host", "route", "network_of_user", "address"),
    [
        (True, "10.1.2.3", "10.9.0.0/16", "127.0.0.1"),
        (False, "10.1.2.3", "", "10.1.2.3"),
        (False, "10.1.2.3", "10.9.0.0/16", "10.9.9.9"),
        (False, "127.0.0.1", "", None),  # rank 0's host, whose name is one for the loopback address
    ],
)
def test_the_jobs_address_under_a_launcher_that_sets_master_addr(
    is_one_host: bool, route: str | None, network_of_user: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "route_to", lambda host: route)
    monkeypatch.setenv("TRAINER_NETWORK", network_of_user)
    assert address_toward_master(is_one_host=is_one_host) == address
