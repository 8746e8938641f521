"""Multi-process test harness: results by rank, and failures that name the rank."""

import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalin.errors import MegalinError, RankStalledError
from megalin.parallel.collectives import all_reduce
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import init_default_group, process_group
from megalin.parallel.rank_failures import Rendezvous, report_failed_ranks
from tests.ranks import RankFailedError, run_ranks

CPU = torch.device("cpu")


def _sum() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    time.sleep(30)


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def _die_before_a_collective() -> None:
    _die_on_rank_one() if dist.get_rank() == 1 else _sum()


def _stall_before_a_collective() -> None:
    time.sleep(60) if dist.get_rank() == 1 else _sum()


def _sleep_on_rank_one() -> None:
    time.sleep(60 if dist.get_rank() == 1 else 0)


def _launch(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Environment variables that a launcher sets for a rank."""
    launch = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in launch.items()}


def _leave_the_group(met: Path) -> int:
    """Destroys the harness's group on all ranks together; returns this rank's number."""
    store, rank = dist.FileStore(str(met), dist.get_world_size()), dist.get_rank()
    # A rank that leaves the harness's group breaks the connections of a rank that is still joining it.
    store.set(f"met/{rank}", "")
    store.wait([f"met/{other}" for other in range(dist.get_world_size())])
    dist.destroy_process_group()
    return rank


def _stall_in_a_launched_group(port: int, met: Path) -> None:
    """Stalls rank 1 in a group opened as `megalin train` opens it under a launcher."""
    os.environ |= _launch(_leave_the_group(met), 3, port)
    with process_group(torch.device("cpu"), timeout=timedelta(seconds=3)):
        _stall_before_a_collective()


def _meet(launch: dict[str, str], seconds: float) -> str:
    group = process_group(CPU, timeout=timedelta(seconds=seconds))
    with patch.dict(os.environ, launch), pytest.raises(MegalinError) as raised, group:
        pass
    return f"{raised.typename}: {raised.value}"


def _meet_without_rank_two(port: int, met: Path) -> str:
    rank = _leave_the_group(met)
    return _meet(_launch(rank, 4, port), 1.5) if rank != 2 else ""


def _meet_where_rank_zero_ends(port: int, met: Path) -> str:
    rank = _leave_the_group(met)
    if rank > 0:
        return _meet(_launch(rank, 2, port), 20)
    store = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
    store.wait(["arrived/1"])
    return ""


def _stop_where_axes_meet() -> None:
    """Stops rank 3 before a collective with rank 2; ranks 0 and 1 then wait for both on another axis."""
    mesh = Mesh(ParallelConfig(pp=2, tp=2), CPU)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    for axis in (mesh.tp.axis, mesh.pp.axis):
        all_reduce(torch.ones(1), axis)


def _end_a_chain_early() -> None:
    """Ends rank 3, which rank 2 notices at once; rank 1 waits longer, for rank 2 alone, and rank 0 for rank 1."""
    _sum()
    rank = dist.get_rank()
    if rank == 3:
        os._exit(0)
    time.sleep(1 if rank < 2 else 0)
    dist.recv(torch.ones(1), rank + 1)


def _join_one_after_the_other(folder: Path) -> tuple[float, float]:
    """Times at which this rank had made its connections, and at which it had joined."""
    rank, connected = dist.get_rank(), []
    dist.destroy_process_group()

    def connect(*_: object, **__: object) -> None:
        time.sleep(rank)
        connected.append(time.monotonic())

    with patch.object(dist, "init_process_group", connect):
        init_default_group(Rendezvous(dist.FileStore(str(folder / "store"), 2), rank, 2, timedelta(seconds=60)), "gloo")
    return connected[0], time.monotonic()


def test_no_rank_leaves_a_group_that_another_still_joins(tmp_path):
    (_, first), (connected, _) = run_ranks(2, _join_one_after_the_other, tmp_path)
    assert first >= connected


def test_results_come_back_by_rank():
    assert run_ranks(3, _sum) == [6.0, 6.0, 6.0]


def test_exception_of_a_rank_is_shown():
    with pytest.raises(RankFailedError, match=r"(?s)rank 1:.*planted"):
        run_ranks(2, _raise_on_rank_one)


def _abort(at: int, starts: Path) -> int:
    start = len(list(starts.iterdir())) + 1 if dist.get_rank() == 0 else 0
    if start:
        (starts / str(start)).touch()
    if 0 < start <= at:
        os.abort()
    return start


def test_stack_of_a_rank_that_a_signal_ended_is_shown(tmp_path):
    with (
        pytest.warns(RuntimeWarning, match="called again"),
        pytest.raises(RankFailedError, match=r"(?s)rank 0 died: -6.*rank 0: Fatal Python error.*in _abort"),
    ):
        run_ranks(1, _abort, 2, tmp_path)


def test_group_is_started_once_more_after_a_rank_aborts(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"(?s)called again, as a rank died.*in _abort"):
        assert run_ranks(1, _abort, 1, tmp_path) == [2]


def test_death_of_a_rank_is_noticed():
    with pytest.raises(RankFailedError, match="rank 1 died: -9"):
        run_ranks(2, _die_on_rank_one)


def test_rank_that_dies_in_a_collective_is_named_with_the_rank_that_waited():
    with pytest.raises(
        RankFailedError, match=r"(?s)rank 1 died: -9(; then rank 0:.*no response from rank 1|; reported: \[\])"
    ):
        run_ranks(2, _die_before_a_collective)


def test_rank_that_stalls_in_a_collective_is_named_within_the_timeout():
    with pytest.raises(
        RankFailedError, match=r"(?s)RankStalledError: .* failed, no response from rank 1: .*Timed out waiting 1600ms"
    ):
        run_ranks(3, _stall_before_a_collective, collective_timeout=1.6)


def test_collective_that_fails_with_the_rank_that_hosts_the_store_names_it():
    class Gone:
        def set(self, *_):
            raise dist.DistNetworkError("Broken pipe")

    with (
        pytest.raises(RankFailedError, match=r"rank 1: a collective failed, rank 0, which hosts .*, has exited: gloo"),
        report_failed_ranks(Rendezvous(Gone(), 1, 2, timedelta(seconds=1))),
    ):
        raise RuntimeError("gloo: connection closed by peer")


def test_failed_collective_is_found_in_the_chain_of_causes():
    with (
        pytest.raises(
            RankFailedError, match=r"rank 0: a collective failed, no response from rank 1: gloo: closed$"
        ) as raised,
        report_failed_ranks(Rendezvous(dist.HashStore(), 0, 2, timedelta(seconds=0.2))),
    ):
        raise RuntimeError("[Stage 0] failed to run forward") from RuntimeError("gloo: closed")
    assert raised.value.exit_code == 6


def test_a_closed_connection_to_a_rank_that_timed_out_is_a_stall():
    store = dist.HashStore()
    store.set("failed/1", "stalled")
    with (
        pytest.raises(RankStalledError, match=r"rank 0: a collective failed, no response from rank 2: ") as raised,
        report_failed_ranks(Rendezvous(store, 0, 3, timedelta(seconds=0.2))),
    ):
        raise RuntimeError("gloo: connection closed by peer")
    assert raised.value.exit_code == 7


def test_another_error_stays_what_it_is():
    with (
        pytest.raises(RuntimeError, match=r"^planted$"),
        report_failed_ranks(Rendezvous(dist.HashStore(), 0, 2, timedelta(seconds=60))),
    ):
        raise RuntimeError("planted")


def test_a_rank_whose_gpu_waited_too_long_for_another_names_it():
    with (
        pytest.raises(
            RankStalledError, match=r"rank 0: a collective failed, no response from rank 1: .*launch failure"
        ),
        report_failed_ranks(Rendezvous(dist.HashStore(), 0, 2, timedelta(seconds=0.2))),
    ):
        raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rank_that_stalls_under_a_launcher_is_named_within_the_timeout(tmp_path, free_port):
    with pytest.raises(
        RankFailedError, match=r"(?s)RankStalledError: .* failed, no response from rank 1: .*Timed out waiting 3000ms"
    ):
        run_ranks(3, _stall_in_a_launched_group, free_port, tmp_path / "met")


def test_rank_that_stops_is_named_by_ranks_on_every_axis():
    with pytest.raises(
        RankFailedError, match=r"(?s)a collective failed, no response from rank 3: .*Timed out waiting 1600"
    ):
        run_ranks(4, _stop_where_axes_meet, collective_timeout=1.6)


def test_ranks_that_wait_for_a_live_one_are_not_named():
    with pytest.raises(RankFailedError, match=r"rank 2: a collective failed, no response from rank 3: "):
        run_ranks(4, _end_a_chain_early, collective_timeout=2.5)


def test_ranks_that_do_not_come_are_named(tmp_path, free_port):
    place = f"127.0.0.1:{free_port}"
    reports = run_ranks(4, _meet_without_rank_two, free_port, tmp_path / "met")
    assert reports[0] == (
        f"RankFailedError: rank 0: timed out after 1.5 s waiting for rank 2 of 4 to join {place}; see its output, and "
        "check that it started and can reach this address"
    )
    for rank in (1, 3):  # rank 0, which hosts the store, may exit before they time out
        expected = f"RankFailedError: rank {rank}: (timed out .* waiting for rank 2 of|the process that hosts {place})"
        assert re.match(expected, reports[rank])


def test_rank_zero_is_named_where_it_does_not_come(free_port):
    assert f"rank 1: timed out after 0.5 s waiting for rank 0 of 2 to join 127.0.0.1:{free_port}; see its" in _meet(
        _launch(1, 2, free_port), 0.5
    )


def test_exit_of_the_host_of_a_rendezvous_is_reported(tmp_path, free_port):
    report = run_ranks(2, _meet_where_rank_zero_ends, free_port, tmp_path / "met")[1]
    assert report.startswith(
        f"RankFailedError: rank 1: the process that hosts 127.0.0.1:{free_port} exited before all ranks had joined: "
    )


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        report = _meet(_launch(0, 2, port), 0.5)
    assert re.match(rf"ConfigError: rank 0 cannot open 127.0.0.1:{port} \(.*\); set MASTER_PORT to a free port", report)


def test_deadline_is_kept_and_names_who_did_not_answer():
    with pytest.raises(RankFailedError, match="timed out: no result from rank 1"):
        run_ranks(2, _sleep_on_rank_one, timeout=4.0)


def test_process_leaves_with_its_error_where_the_group_does_not_end(monkeypatch, capfd):
    codes, left = list[int](), threading.Event()
    destroy = dist.destroy_process_group

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    def blocked() -> None:
        left.wait(5.0)
        destroy()

    monkeypatch.setattr("megalin.parallel.process_group._LEAVE_SECONDS", 0.0)
    monkeypatch.setattr(dist, "destroy_process_group", blocked)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(os, "_exit", leave)
    for error in (RankStalledError("planted"), KeyError("planted")):
        left.clear()
        with pytest.raises(type(error)), process_group(CPU):
            raise error
    assert codes == [7, 1]
    text = capfd.readouterr().err
    assert text.startswith("RankStalledError: planted\nTraceback ")
    assert text.endswith("KeyError: 'planted'\n")
