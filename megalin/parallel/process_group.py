"""Process groups of a run: the default one, on this rank's device, and those of subsets of ranks, with its timeout."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from megalin.errors import ConfigError, MegalinError, RankFailedError
from megalin.launch import Launch, is_on_one_host, launched
from megalin.parallel.collectives import COLLECTIVE_TIMEOUT
from megalin.parallel.messages import gather_values
from megalin.parallel.rank_failures import Rendezvous, default_rendezvous, liveness_responder, report_failed_ranks

SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable that makes NCCL allow several ranks on one GPU."""
_LEAVE_SECONDS = 10.0
"""Time for the end of the process group after an error. A step that is in flight may end in it."""
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that chooses gloo's network interface."""


def compute_device() -> torch.device:
    """This rank's device: its local GPU where CUDA is available, else the CPU.

    If a process has one visible GPU, that is its own (srun --gpus-per-task 1), or one that all ranks share: NCCL allows
    it from 2.30 on if NCCL_MULTI_RANK_GPU_ENABLE is 1, and `process_group` refuses it otherwise.

    Raises:
        ConfigError: the launch is broken, or started more ranks on this host than it has GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, count = launched().local_rank, torch.cuda.device_count()
    if local_rank >= count > 1:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}, but {count} GPUs are visible on this host; start at most {count} ranks on it"
        )
    return torch.device("cuda", local_rank if count > 1 else 0)


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Iterator[None]:
    """The default process group for the body: the launcher's ranks, or this process alone. NCCL on GPUs, else gloo.

    Raises:
        ConfigError: ranks share a GPU without NCCL_MULTI_RANK_GPU_ENABLE.
        RankFailedError: a collective failed, or ranks did not join; it names the ranks that did not take part, and is a
            RankStalledError if the collective timed out.

    Where the body raises on one of several ranks and the group's end takes longer than 10 s, the process ends with the
    error and its exit code.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _loopback_interface():
        rendezvous = _rendezvous(launched(), min(timeout, COLLECTIVE_TIMEOUT))._replace(timeout=timeout)
        try:
            with report_failed_ranks(rendezvous):
                init_default_group(rendezvous, backend)
            with report_failed_ranks(default_rendezvous()), liveness_responder(default_rendezvous()):
                if device.type == "cuda":
                    refuse_shared_gpus(f"{socket.gethostname()}, {torch.cuda.get_device_properties(device).uuid}")
                yield
        except BaseException as error:
            alone = not dist.is_initialized() or dist.get_world_size() == 1
            with nullcontext() if alone else _exit_if_late(error):
                _destroy_default_group()
            raise
        _destroy_default_group()


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _exit_if_late(error: BaseException) -> Iterator[None]:
    """Ends the process with the error where the body takes too long: NCCL's shutdown waits for kernels, and these for
    ranks that may never launch theirs."""
    left = threading.Event()

    def watch() -> None:
        if not left.wait(_LEAVE_SECONDS):
            lines = [f"{type(error).__name__}: {error}\n"]
            if not isinstance(error, MegalinError):
                lines = traceback.format_exception(error)
            with suppress(OSError):  # nobody may read it any more
                os.write(2, "".join(lines).encode())
            os._exit(getattr(error, "exit_code", 1))

    threading.Thread(target=watch, name="megalin-end-of-group", daemon=True).start()
    try:
        yield
    finally:
        left.set()


@contextmanager
def _loopback_interface() -> Iterator[None]:
    """Keeps gloo's sockets on the loopback interface during the body, unless the environment chooses another or ranks
    run on other hosts: gloo would accept connections on the address of this host's name."""
    interfaces = [name for _, name in socket.if_nameindex()]
    chosen = _GLOO_INTERFACE not in os.environ and _is_on_loopback() and "lo" in interfaces
    if chosen:
        os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        if chosen:
            del os.environ[_GLOO_INTERFACE]


def _is_on_loopback() -> bool:
    return launched().world_size == 1 or _loopback_address(os.environ["MASTER_ADDR"]) is not None


def init_default_group(rendezvous: Rendezvous, backend: str) -> None:
    """Creates the default process group; returns once every rank has joined it. A rank that left earlier, with or
    without an error, would break the other ranks' connections while they are made."""
    store, rank, world_size, timeout = rendezvous
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{other}" for other in range(world_size)], timeout)


def _rendezvous(launch: Launch, timeout: timedelta) -> Rendezvous:
    """The rendezvous of all ranks of the launch. Raises ConfigError, or RankFailedError that names missing ranks."""
    rank, world_size = launch.rank, launch.world_size
    if world_size == 1:
        return Rendezvous(dist.HashStore(), rank, world_size, timeout)  # type: ignore[attr-defined]
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _open_store(launch, timeout)
    except dist.DistError as error:
        if rank == 0:
            raise ConfigError(f"rank 0 cannot open {address} ({error}); set MASTER_PORT to a free port") from None
        raise RankFailedError(_missing([0], launch, timeout, address)) from error
    try:
        store.set(f"arrived/{rank}", "")
        if store.add("arrived", 1) == world_size:
            store.set("all arrived", "")
        try:
            store.wait(["all arrived"], timeout)
        except dist.DistStoreError as error:
            missing = [other for other in range(world_size) if not store.check([f"arrived/{other}"])]
            raise RankFailedError(_missing(missing, launch, timeout, address)) from error
    except dist.DistError as error:
        raise RankFailedError(
            f"rank {rank}: the process that hosts {address} exited before all ranks had joined: {error}"
        ) from error
    return Rendezvous(store, rank, world_size, timeout)


def _missing(ranks: Sequence[int], launch: Launch, timeout: timedelta, address: str) -> str:
    return (
        f"rank {launch.rank}: timed out after {timeout.total_seconds():g} s waiting for rank "
        f"{', '.join(map(str, ranks))} of {launch.world_size} to join {address}; see its output, and check that it "
        "started and can reach this address"
    )


def _open_store(launch: Launch, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """torchrun's store, or rank 0's, which unlike torch's own rendezvous does not block until all ranks connect."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return next(torch_rendezvous("env://", timeout=timeout))[0]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    loopback = _loopback_address(address)
    listener = _loopback_listener(loopback, port) if loopback is not None and launch.rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        address if loopback is None else loopback,
        port,
        launch.world_size,
        launch.rank == 0,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
        multi_tenant=listener is None,
    )


def _loopback_address(address: str) -> str | None:
    """The loopback address for the rendezvous of ranks that all run on this host: their launcher says so, or `address`
    is a loopback one. None where other hosts connect to it.

    A name is not resolved if the launcher names other hosts: on Debian a host's own name is 127.0.1.1.
    """
    one_host = is_on_one_host()
    flags = socket.AI_NUMERICHOST if one_host is False else 0
    try:
        places = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM, flags=flags)
    except OSError:
        places = []  # torch names the address that it cannot resolve
    found = {str(place[4][0]) for place in places}
    if found and all(ipaddress.ip_address(each).is_loopback for each in found):
        return min(found, key=lambda each: ":" in each)  # IPv4 first
    return "127.0.0.1" if one_host else None


def _loopback_listener(address: str, port: int) -> int:
    """The descriptor of a listening socket on a loopback address, which torch's store would open on every interface.

    Raises:
        DistError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024).detach()
    except OSError as error:
        raise dist.DistError(str(error)) from None


def refuse_shared_gpus(gpu: str) -> None:
    """Raises on all ranks where several have the same GPU, before NCCL does; a collective.

    Args:
        gpu: this rank's host and GPU.

    Raises:
        ConfigError: ranks share a GPU, which it names, and NCCL_MULTI_RANK_GPU_ENABLE is not 1.
    """
    if os.environ.get(SHARED_GPUS) == "1":
        return
    gpus = gather_values(gpu, dist.group.WORLD)
    shared = next((name for name, count in Counter(gpus).items() if count > 1), None)
    if shared is not None:
        ranks = ", ".join(str(rank) for rank, name in enumerate(gpus) if name == shared)
        raise ConfigError(
            f"ranks {ranks} have the same GPU ({shared}); start one rank a GPU, or, to try a mesh without its speed, "
            f"set {SHARED_GPUS}=1 (NCCL 2.30 or later)"
        )


def open_groups(name: str, rank_lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Makes a group of each of these disjoint lists of ranks; returns this rank's, None where it is in no list.

    Groups have the timeout of the default group; those that torch makes for a device mesh wait half an hour. A
    collective of all ranks of the run.
    """
    timeout = default_rendezvous().timeout
    own: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(rank_lists, timeout=timeout, group_desc=name)[0]
    return own


def open_group(name: str, ranks: Tensor, *dims: int) -> dist.ProcessGroup:
    """The group of this rank along `dims` of `ranks`, which holds every rank of the run once: the default group where
    `dims` span all ranks, else one of `open_groups`."""
    size = math.prod(ranks.shape[dim] for dim in dims)
    group = dist.group.WORLD
    if size < ranks.numel():
        group = open_groups(name, ranks.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size).tolist())
    assert group is not None, (name, ranks)
    return group
