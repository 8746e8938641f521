"""The process groups of a run: the default one, on this rank's device, and those of rows of ranks, as patient as it."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from megalin.errors import ConfigError, RankFailedError
from megalin.launch import Launch, launched
from megalin.parallel.collectives import EXCHANGE_TIMEOUT, gather_objects
from megalin.parallel.rank_failures import Rendezvous, answering, default_rendezvous, report_failed_ranks

SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which NCCL lets ranks share a GPU."""


def compute_device() -> torch.device:
    """This rank's device: its local GPU where CUDA is available, else the CPU.

    The only GPU that a process sees is its own (srun --gpus-per-task 1), or one that all ranks share, as NCCL lets them
    from 2.30 on if NCCL_MULTI_RANK_GPU_ENABLE is 1: `process_group` refuses it where that is not set.

    Raises:
        ConfigError: where the launch is broken, or started more ranks on this host than it has GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, count = launched().local_rank, torch.cuda.device_count()
    if local_rank >= count > 1:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}, but this host shows {count} GPUs; start at most {count} ranks on it"
        )
    return torch.device("cuda", local_rank if count > 1 else 0)


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta = EXCHANGE_TIMEOUT) -> Iterator[None]:
    """The default process group for the body: the launcher's ranks, or this process alone. NCCL on GPUs, else gloo.

    Raises:
        ConfigError: ranks share a GPU, which was not asked for.
        RankFailedError: an exchange failed, or ranks did not come; it names those that had no part in it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    place = _meet(launched(), timeout)
    try:
        with report_failed_ranks(place):
            join(place, backend)
        with report_failed_ranks(default_rendezvous()), answering(default_rendezvous()):
            if device.type == "cuda":
                refuse_shared_gpus(f"{socket.gethostname()}, {torch.cuda.get_device_properties(device).uuid}")
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join(place: Rendezvous, backend: str) -> None:
    """Makes the default process group of ranks that have met; returns where every rank has: one that left before, with
    an error or without, would break the others' connections to it while they are made."""
    store, rank, world_size, timeout = place
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{other}" for other in range(world_size)], timeout)


def _meet(launch: Launch, timeout: timedelta) -> Rendezvous:
    """Where all ranks have come. Raises ConfigError and RankFailedError, which names those that have not."""
    rank, world_size = launch.rank, launch.world_size
    if world_size == 1:
        return Rendezvous(dist.HashStore(), rank, world_size, timeout)  # type: ignore[attr-defined]
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _open_store(launch, timeout)
    except dist.DistError as error:
        if rank == 0:
            raise ConfigError(f"rank 0 cannot open {place} ({error}); set MASTER_PORT to a port that is free") from None
        raise RankFailedError(_missing([0], launch, timeout, place)) from error
    try:
        store.set(f"came/{rank}", "")
        if store.add("came", 1) == world_size:
            store.set("all came", "")
        try:
            store.wait(["all came"], timeout)
        except dist.DistStoreError as error:
            missing = [other for other in range(world_size) if not store.check([f"came/{other}"])]
            raise RankFailedError(_missing(missing, launch, timeout, place)) from error
    except dist.DistError as error:
        raise RankFailedError(f"rank {rank}: who keeps {place} ended before all ranks had met: {error}") from error
    return Rendezvous(store, rank, world_size, timeout)


def _missing(ranks: Sequence[int], launch: Launch, timeout: timedelta, place: str) -> str:
    return (
        f"rank {launch.rank}: no word from rank {', '.join(map(str, ranks))} in the {timeout.total_seconds():g} s in "
        f"which all {launch.world_size} were to meet at {place}; see what they print, whether they were started, and "
        "whether their hosts reach this address"
    )


def _open_store(launch: Launch, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """torchrun's store, or that of rank 0, which unlike torch's own rendezvous does not wait for ranks unseen."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return next(rendezvous("env://", timeout=timeout))[0]
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        launch.world_size,
        launch.rank == 0,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def refuse_shared_gpus(gpu: str) -> None:
    """Where ranks have the same GPU, an error on all of them, before NCCL's own; a collective.

    Args:
        gpu: this rank's host and GPU.

    Raises:
        ConfigError: which ranks share one, and NCCL_MULTI_RANK_GPU_ENABLE is not 1.
    """
    if os.environ.get(SHARED_GPUS) == "1":
        return
    gpus = gather_objects(gpu, dist.group.WORLD)
    shared = next((name for name, count in Counter(gpus).items() if count > 1), None)
    if shared is not None:
        ranks = ", ".join(str(rank) for rank, name in enumerate(gpus) if name == shared)
        raise ConfigError(
            f"ranks {ranks} have the same GPU ({shared}); start one rank a GPU, or, to try a mesh without its speed, "
            f"set {SHARED_GPUS}=1 (NCCL 2.30 or later)"
        )


def open_groups(name: str, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Makes a group of each of these rows of ranks, none of which share one; returns that of this rank, None without.

    It waits as long as the default group does: those that torch makes for a device mesh wait half an hour. A collective
    of all ranks of the run.
    """
    timeout = default_rendezvous().timeout
    own: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(rows, timeout=timeout, group_desc=name)[0]
    return own


def open_group(name: str, ranks: Tensor, *dims: int) -> dist.ProcessGroup:
    """The group of this rank's row along `dims` of `ranks`, which has every rank of the run once: the default group
    where there is one row, else one of `open_groups`."""
    size = math.prod(ranks.shape[dim] for dim in dims)
    group = dist.group.WORLD
    if size < ranks.numel():
        group = open_groups(name, ranks.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size).tolist())
    assert group is not None, (name, ranks)
    return group
