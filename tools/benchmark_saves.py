"""Time that checkpoints take of a run: wall clock without saves, with saves in the background and in the foreground.

python tools/benchmark_saves.py transnormerllm-1b --steps 400 --every 100 train.compile=true
OMP_NUM_THREADS=1 python tools/benchmark_saves.py tnl-70m model.vocab_size=52000 train.dtype=float32 \\
    data.sequence_length=256 train.micro_batch_size=1
torchrun --nproc-per-node 2 tools/benchmark_saves.py transnormerllm-1b --steps 400 --every 100

Takes a preset or a config file and overrides, as benchmark_train.py, and trains on random tokens. Each run is
`megalin.train` with its metrics and ledger, in a folder of its own that is removed after it; --folder chooses the file
system. The clock runs from the update of step --warmup to that of the last step, whose checkpoint it excludes, so
there are (steps - 1) // every saves in it. The last line is JSON; `stall_seconds_per_gb` is the wait of the steps
for a save, over the state of all ranks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_benchmarks.engine import KEYS, run_config

from megalin.config import parse
from megalin.data.shards.indexed_dataset import ShardWriter
from megalin.launch import launched
from megalin.parallel.agreement import on_rank_zero, rank
from megalin.parallel.process_group import compute_device, process_group
from megalin.terminal_output import exit_code
from megalin.train.config import RunConfig
from megalin.train.loop import train

_SAMPLES = 64
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "background": {"background": True},
    "foreground": {"background": False},
}


class Clock:
    """Update hook that notes the time of two steps' updates."""

    name = "clock"

    def __init__(self, device: torch.device, steps: tuple[int, int]) -> None:
        self._device, self._steps = device, steps
        self.times: list[float] = []

    def memory_bytes(self, elements: int) -> int:
        return 0

    def start(self, weights: Mapping[str, Tensor]) -> None:
        pass

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        if step in self._steps:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.times.append(time.perf_counter())

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"overrides of {', '.join(KEYS)}")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run (100)")
    parser.add_argument("--every", type=int, default=10, help="steps between saves (10)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (5)")
    parser.add_argument("--keep-latest", type=int, default=2, help="checkpoints to keep (2)")
    parser.add_argument("--folder", type=Path, help="folder for the runs (the system's temporary one)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["none", "background", "foreground"])
    arguments = parser.parse_intermixed_args()
    if not 1 <= arguments.warmup < arguments.every < arguments.steps:
        parser.error(
            f"--warmup {arguments.warmup} --every {arguments.every} --steps {arguments.steps}: use 1 or more, then "
            "more for each"
        )
    return arguments


def write_tokens(folder: Path, run: RunConfig) -> None:
    """Writes a shard of random tokens, which the run reads again and again."""
    length, vocab_size, generator = run.data.sequence_length, run.model.vocab_size, np.random.default_rng(0)
    with ShardWriter(str(folder / "tokens"), np.dtype("uint16" if vocab_size <= 1 << 16 else "int32")) as shard:
        for _ in range(_SAMPLES):
            shard.add_sequence(generator.integers(0, vocab_size, length + 1))
            shard.end_document()
        shard.publish()


def configured(run: RunConfig, arguments: argparse.Namespace, folder: Path, mode: str) -> RunConfig:
    """The run config of a mode."""
    values = run.model_dump(mode="json", exclude_none=True)
    values["data"]["train"] = [str(folder / "tokens")]
    values["train"]["steps"] = arguments.steps
    saves = {"every_steps": arguments.every, "keep_latest": arguments.keep_latest} if mode != "none" else {}
    values["checkpoint"] = MODES[mode] | saves
    return parse(RunConfig, values, arguments.config)


def measure(run: RunConfig, device: torch.device, folder: Path, steps: tuple[int, int]) -> dict[str, float]:
    """Trains in a new folder, and removes it."""
    clock = Clock(device, steps)
    train(run, device, folder, hooks=[clock])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > steps[0]]
    (checkpoint,) = sorted(folder.glob("checkpoints/step-*"))[-1:]
    on_rank_zero(lambda: None)  # every rank has read
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    found = {
        "wall_seconds": clock.times[1] - clock.times[0],
        "step_seconds": statistics.median(line["step_seconds"] for line in lines),
        "state_gb": size / 1e9,
    }
    for name, key in (("stall_seconds", "save_seconds"), ("write_seconds", "save_write_seconds")):
        if values := [line[key] for line in lines if key in line]:
            found |= {name: statistics.mean(values), f"longest_{name}": max(values)}
    if "stall_seconds" in found:
        found["stall_seconds_per_gb"] = found["stall_seconds"] / found["state_gb"]
    on_rank_zero(lambda: shutil.rmtree(folder))
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    arguments, device = parse_arguments(), compute_device()
    run = run_config(arguments.config, arguments.overrides, launched().world_size)
    with process_group(device):
        folder = on_rank_zero(lambda: Path(tempfile.mkdtemp(prefix="saves-", dir=arguments.folder)), Path)
        on_rank_zero(lambda: write_tokens(folder, run))
        found: dict[str, Any] = {"config": arguments.config, "device": str(device), "torch": torch.__version__}
        for number, mode in enumerate(arguments.modes):
            config = configured(run, arguments, folder, mode)
            key = mode if mode not in found else f"{mode} {number}"
            found[key] = measure(config, device, folder / f"run-{number}", (arguments.warmup, arguments.steps))
            base = [value["wall_seconds"] for name, value in found.items() if name.startswith("none")]
            if base and mode != "none":
                found[key]["overhead"] = round(found[key]["wall_seconds"] / min(base) - 1.0, 4)
            if rank() == 0:
                print(json.dumps({key: found[key]}), flush=True)
        on_rank_zero(lambda: shutil.rmtree(folder))
    if rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
