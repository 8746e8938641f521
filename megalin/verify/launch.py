"""Starts the ranks of a verification on this machine when no launcher did."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def launch_ranks(world_size: int, arguments: Sequence[str]) -> int:
    """Runs `python -m megalin ARGUMENTS` once a rank, over gloo on this machine's CPU; returns the first exit code
    that is not 0, else 0. When a rank fails, the others are ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Ranks of a toy model gain nothing from more threads, and would fight over the cores.
    shared |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "megalin", *arguments]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]
    code = 0
    try:
        waiting = list(ranks)
        while waiting and not code:
            for rank in list(waiting):
                try:
                    code = code or rank.wait(timeout=0.1)
                    waiting.remove(rank)
                except subprocess.TimeoutExpired:
                    continue
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()
                rank.wait()
    return code
