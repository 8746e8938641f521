"""Rank program of test_p2p_copies_gpu.py: torchrun -m tests.gpu.p2p_runs train CONFIG FOLDER, send or stall."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megalin.parallel.heartbeats import Heartbeat
from megalin.parallel.p2p_copies import SLOTS, P2PChannels, open_channels
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.config import load_run_config
from megalin.train.loop import train

SCHEDULES = {"1f1b": [], "interleaved": ['parallel.pp_schedule="interleaved"', "parallel.pp_stages_per_rank=2"]}
SHAPE = (1024, 1024)


def train_each(config: Path, folder: Path, device: torch.device) -> None:
    """Trains with every schedule, through symmetric memory and by sends."""
    for schedule, overrides in SCHEDULES.items():
        for transfer in ("symmetric_memory", "p2p"):
            run = load_run_config(config, ["parallel.pp=2", f'parallel.pp_transfer="{transfer}"', *overrides])
            train(run, device, folder / f"{schedule}-{transfer}")


def open_pair(device: torch.device, timeout: timedelta) -> P2PChannels:
    group = dist.group.WORLD
    assert group is not None
    channels = open_channels(1, SHAPE, torch.float32, device, group=group, timeout=timeout, launches=Heartbeat())
    assert isinstance(channels, P2PChannels), channels
    return channels


def send_many(device: torch.device) -> None:
    """Sends more tensors than there are slots, to a receiver slow at first from a sender slow later."""
    channels, count = open_pair(device, timedelta(seconds=20)), 8 * SLOTS
    if dist.get_rank() == 0:
        sender = channels.sender(1, 0)
        for number in range(count):
            if number > count // 2:
                torch.cuda._sleep(10**7)
            sender.send(torch.full(SHAPE, float(number), device=device))
    else:
        receiver, found = channels.receiver(0, 0), []
        for number in range(count):
            if number < count // 2:
                torch.cuda._sleep(10**7)
            into = torch.empty(SHAPE, device=device, requires_grad=True)
            receiver.receive(into)
            found.append(torch.stack([into.min(), into.max()]))
        expected = torch.arange(count, device=device, dtype=torch.float32)[:, None].expand(-1, 2)
        assert torch.equal(torch.stack(found), expected), found
    torch.cuda.synchronize()
    dist.barrier()


def stall(device: torch.device) -> None:
    """Stalls rank 1, from which rank 0 waits to receive."""
    channels = open_pair(device, timedelta(seconds=2))
    if dist.get_rank() == 0:
        channels.receiver(1, 0).receive(torch.empty(SHAPE, device=device))
        torch.cuda.synchronize()
    else:
        time.sleep(60)


def main() -> None:
    device = compute_device()
    with process_group(device):
        if sys.argv[1] == "train":
            train_each(Path(sys.argv[2]), Path(sys.argv[3]), device)
        elif sys.argv[1] == "send":
            send_many(device)
        else:
            stall(device)


if __name__ == "__main__":
    main()
