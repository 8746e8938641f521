"""Rank 0's store: on loopback alone where the address is one, and a port that is taken is named."""

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


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_store_of_one_host_listens_on_loopback_alone(monkeypatch, address):
    port = _free_port()
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = process_group._open_store(RANK_ZERO, SECOND)
    assert _listening_addresses(port) == ["0100007F"]
    other = process_group._open_store(Launch(1, 2, 1), SECOND)
    other.set("a", "b")
    assert store.get("a") == b"b"


def test_address_of_other_hosts_is_left_to_torch():
    assert process_group._loopback_listener("10.1.2.3", 1) is None
    assert process_group._loopback_listener("no-such-host.invalid", 1) is None


def test_port_that_is_taken_is_an_error_of_the_rendezvous():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(dist.DistError, match="Address already in use"):
        process_group._loopback_listener("127.0.0.1", taken.getsockname()[1])
