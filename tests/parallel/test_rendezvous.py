"""Sockets of ranks: on loopback alone where all of them are on this host, and a port that is taken is named."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megalin.launch import Launch
from megalin.parallel import process_group

RANK_ZERO = Launch(0, 2, 0)
SECOND = timedelta(seconds=1)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listening_addresses(port):
    """Addresses, in hex, of this machine's sockets that listen on the port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    places = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return [address for address, number in places if int(number, 16) == port]


def _meet(monkeypatch, address, **environment):
    """Opens the store of two ranks; returns the addresses that it listens on."""
    port = _free_port()
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    for name, value in (ranks | environment).items():
        monkeypatch.setenv(name, value)
    store = process_group._open_store(RANK_ZERO, SECOND)
    other = process_group._open_store(Launch(1, 2, 1), SECOND)
    other.set("a", "b")
    assert store.get("a") == b"b"
    return _listening_addresses(port)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_store_of_one_host_listens_on_loopback_alone(monkeypatch, address):
    assert _meet(monkeypatch, address) == ["0100007F"]


def test_store_is_on_loopback_if_the_launcher_started_all_ranks_on_this_host(monkeypatch):
    assert _meet(monkeypatch, "no-such-host.invalid", LOCAL_WORLD_SIZE="2") == ["0100007F"]


def test_address_of_other_hosts_is_left_to_torch(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert process_group._loopback_address("10.1.2.3") is None
    assert process_group._loopback_address("no-such-host.invalid") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert process_group._loopback_address("localhost") is None  # as a host's own name is on Debian
    assert process_group._loopback_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "lo"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "lo"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.1.2.3"}, None),
    ],
)
def test_gloo_listens_on_loopback_alone_unless_the_user_or_other_hosts_need_another(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with process_group._loopback_interface():
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    assert os.environ.get("GLOO_SOCKET_IFNAME") == environment.get("GLOO_SOCKET_IFNAME")


def test_port_that_is_taken_is_an_error_of_the_rendezvous():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(dist.DistError, match="Address already in use"):
        process_group._loopback_listener("127.0.0.1", taken.getsockname()[1])
