"""The store in which the ranks of one host meet, for a process of its own that outlives any of them."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_IDLE_SECONDS = 3600.0


def loopback_listener() -> socket.socket:
    """A listening socket on a free port of the loopback address, which no other host reaches."""
    return socket.create_server((LOOPBACK, 0), backlog=1024)


def store_environment(port: int) -> dict[str, str]:
    """Variables with which the ranks' process group connects to the store at `port` and hosts none of its own."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}


def serve_store(listener: socket.socket) -> NoReturn:
    """Serves the store on a listening socket until a signal ends this process."""
    port = listener.getsockname()[1]
    descriptor = os.dup(listener.fileno())
    listener.close()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK,
        port,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=descriptor,
        multi_tenant=False,
    )
    while True:
        time.sleep(_IDLE_SECONDS)
        assert store is not None
