"""Point-to-point channels over symmetric memory: order, no loss, and the bits of plain sends and receives."""

from __future__ import annotations

import socket
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from megalin.__main__ import main
from megalin.errors import ConfigError
from megalin.model.pipeline_partition import interleaved_order
from megalin.parallel import pipeline_schedules
from megalin.parallel.heartbeats import Heartbeat
from megalin.parallel.p2p_copies import SLOTS, P2PChannels, open_channels
from tests.model_runs import checkpoint_tensors, metrics, model_table, train_here, write_config
from tests.parallel.shared_memory import SharedMemory
from tests.ranks import RankFailedError, run_ranks

SHAPE = (2, 3)
SECOND = timedelta(seconds=1)


def both_ranks(folder: Path, *, num_channels: int = 1) -> list[P2PChannels]:
    """Channels of two ranks over one memory, both in this process."""
    numel = num_channels * SLOTS * torch.Size(SHAPE).numel()
    memories = [SharedMemory(folder, rank, 2, numel, torch.float32) for rank in range(2)]
    return [
        P2PChannels(memory, rank, SHAPE, torch.float32, Heartbeat(), timeout=SECOND)
        for rank, memory in enumerate(memories)
    ]


def sent(number: float) -> torch.Tensor:
    return torch.full(SHAPE, number)


def received(receiver: Any) -> float:
    into = torch.empty(SHAPE, requires_grad=True)  # like the buffers of torch's pipeline schedules
    receiver.receive(into)
    assert (into == into[0, 0]).all()
    return into[0, 0].item()


def test_tensors_arrive_in_the_order_in_which_they_were_sent(tmp_path):
    first, second = both_ranks(tmp_path)
    sender, receiver = first.sender(1, 0), second.receiver(0, 0)
    for number in range(3 * SLOTS):
        sender.send(sent(number))
        if number >= SLOTS - 1:
            assert received(receiver) == number - SLOTS + 1


def test_channels_do_not_touch_each_other(tmp_path):
    """Two channels each way."""
    first, second = both_ranks(tmp_path, num_channels=2)
    ways = [(one.sender(to, channel), other.receiver(source, channel)) for one, other, source, to in
            ((first, second, 0, 1), (second, first, 1, 0)) for channel in range(2)]  # fmt: skip
    for turn in range(2 * SLOTS):
        for number, (sender, _) in enumerate(ways):
            sender.send(sent(10 * turn + number))
        assert [received(receiver) for _, receiver in ways] == [10 * turn + number for number in range(4)]


def test_a_slot_that_was_not_read_is_not_written(tmp_path):
    first, second = both_ranks(tmp_path)
    sender, receiver = first.sender(1, 0), second.receiver(0, 0)
    for number in range(SLOTS):
        sender.send(sent(number))
    with pytest.raises(RuntimeError, match="launch failure"):
        sender.send(sent(SLOTS))
    assert received(receiver) == 0


def test_nothing_is_received_before_it_was_sent(tmp_path):
    with pytest.raises(RuntimeError, match="launch failure"):
        received(both_ranks(tmp_path)[1].receiver(0, 0))


def test_transfers_are_recorded(tmp_path):
    launches = Heartbeat()
    memory = SharedMemory(tmp_path, 0, 1, 2 * SLOTS * 6, torch.float32)
    channels = P2PChannels(memory, 0, SHAPE, torch.float32, launches, timeout=SECOND)
    channels.sender(0, 1).send(sent(1.0))
    assert received(channels.receiver(0, 1)) == 1.0
    assert [launch[:5] for launch in launches.recent()] == [
        (0, "send to rank 0, channel 1", "pp", SHAPE, 0),
        (1, "receive from rank 0, channel 1", "pp", SHAPE, 0),
    ]


def train_with_channels(config: Path, folder: Path, *overrides: str) -> int:
    """Trains with channels in shared files; returns the number of tensors that the steps sent without them."""
    number = 0

    def open_in_files(
        num_channels: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Any,
        *,
        group: Any,
        launches: Heartbeat,
        **_: Any,
    ) -> Any:
        nonlocal number
        column = dist.get_rank() % (dist.get_world_size() // group.size())
        here = folder / f"memory-{number}-{column}"
        number += 1
        if group.rank() == 0:
            here.mkdir(parents=True)
        dist.barrier(group)
        numel = num_channels * SLOTS * torch.Size(shape).numel()
        memory = SharedMemory(here, group.rank(), group.size(), numel, dtype)
        return P2PChannels(memory, group.rank(), shape, dtype, launches, timeout=timedelta(seconds=20))

    num_sent = 0
    batch_p2p = schedules._batch_p2p

    def counted(ops: list[dist.P2POp], *args: Any, **options: Any) -> Any:
        nonlocal num_sent
        num_sent += sum(op.tensor.dim() == 3 for op in ops)
        return batch_p2p(ops, *args, **options)

    with (
        patch.object(pipeline_schedules, "open_channels", open_in_files),
        patch.object(schedules, "_batch_p2p", counted),
    ):
        train_here(config, folder, *overrides)
    assert number > 0
    return num_sent


INTERLEAVED = ('parallel.pp_schedule="interleaved"', "parallel.pp_stages_per_rank=2")


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ["parallel.pp=2"]),
        pytest.param(4, ["parallel.pp=4"], marks=pytest.mark.slow),
        (2, ["parallel.pp=2", *INTERLEAVED]),
        pytest.param(
            4,
            ["parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true", *INTERLEAVED],
            marks=pytest.mark.slow,
        ),
        pytest.param(4, ["parallel.pp=2", "parallel.cp=2"], marks=pytest.mark.slow),
        pytest.param(
            2,
            ["parallel.pp=2", 'parallel.pp_schedule="zero_bubble"', "parallel.pp_stages_per_rank=2"],
            marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="refused before torch 2.13"),
        ),
    ],
    ids=["pp2", "pp4", "interleaved", "interleaved_tp2", "cp2", "zero_bubble"],
)
def test_a_run_with_channels_has_the_bits_of_one_that_sends(tmp_path, world_size, overrides):
    table = model_table()
    config = write_config(tmp_path, model={"layers": table["layers"] * 2}, train={"micro_batch_size": 1, "steps": 3})
    by_send, by_copy = tmp_path / "send", tmp_path / "copy"
    run_ranks(world_size, train_here, config, by_send, 'parallel.pp_transfer="p2p"', *overrides)
    assert run_ranks(world_size, train_with_channels, config, by_copy, *overrides) == [0] * world_size
    assert metrics(by_copy) == metrics(by_send)
    expected = checkpoint_tensors(by_send)
    for name, tensor in checkpoint_tensors(by_copy).items():
        assert torch.equal(tensor, expected[name]), name


def open_on_hosts(host: str) -> P2PChannels | str:
    """A rank's channels, or its reason for having none, on CPU ranks whose hosts have these names."""
    with patch.object(socket, "gethostname", lambda: host.format(rank=dist.get_rank())):
        return open_channels(
            2, SHAPE, torch.float32, torch.device("cuda"), group=dist.group.WORLD, timeout=SECOND, launches=Heartbeat()
        )


def test_every_rank_has_the_same_reason_for_no_channels():
    assert run_ranks(2, open_on_hosts, "host{rank}") == ["the ranks of the axis are on 2 hosts"] * 2
    here, there = run_ranks(2, open_on_hosts, "host")
    assert here == there
    assert "torch's symmetric memory fails on rank 0 of the axis: " in here


def test_copies_on_cpus_are_refused(tmp_path):
    config = write_config(tmp_path, train={"micro_batch_size": 1})
    overrides = ["parallel.pp=2", 'parallel.pp_transfer="symmetric_memory"']
    with pytest.raises(
        RankFailedError,
        match=r'pp_transfer = "symmetric_memory" needs .* GPUs, but the ranks compute on cpu; use "auto"',
    ):
        run_ranks(2, train_here, config, tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_verify_refuses_copies_before_it_starts_its_ranks(capsys):
    assert (
        main(["verify", "transnormerllm-1b-64k", "parallel.pp=2", "parallel.pp_transfer=symmetric_memory"])
        == ConfigError.exit_code
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('ConfigError: parallel.pp_transfer = "symmetric_memory" needs the copy engines of GPUs')


def program(rank: int, num_ranks: int, stages: int, count: int) -> list[tuple[str, tuple[int, bool]]]:
    """Receives and sends of a rank in a step, in order; a channel is (receiving stage, backward)."""
    last = num_ranks * stages - 1
    if stages == 1:
        ahead = num_ranks - rank
        forwards, backwards = [(rank, False)] * count, [(rank, True)] * count
        order = forwards[:ahead]
        for index, backward in enumerate(backwards):
            order += [backward, *forwards[ahead + index : ahead + index + 1]]
    else:
        order = [(each.stage, each.backward) for each in interleaved_order(rank, num_ranks, stages, count)]
    events: list[tuple[str, tuple[int, bool]]] = []
    for stage, backward in order:
        before, after = (stage + 1, stage - 1) if backward else (stage - 1, stage + 1)
        if 0 <= before <= last:
            events.append(("receive", (stage, backward)))
        if 0 <= after <= last:
            events.append(("send", (after, backward)))
    return events


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_no_schedule_waits_for_itself(num_ranks, stages, rounds):
    """Even if a rank computes nothing until its earlier sends have found a free slot."""
    programs = [program(rank, num_ranks, stages, rounds * num_ranks) for rank in range(num_ranks)]
    places, waiting = [0] * num_ranks, Counter[tuple[int, bool]]()
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(programs):
            while places[rank] < len(events):
                what, channel = events[places[rank]]
                if waiting[channel] == (SLOTS if what == "send" else 0):
                    break
                waiting[channel] += 1 if what == "send" else -1
                places[rank], moved = places[rank] + 1, True
    assert places == [len(events) for events in programs]
