"""Measurements on H200 and H100 (docs/benchmarks/) and the planner's estimates; prints the table of docs/planner.md."""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

import torch

from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.parallel.float8_layers import Float8Settings
from megalin.planner.estimate import Estimate, Estimator
from megalin.planner.hardware import HARDWARE
from megalin.planner.workload import ParallelLayout, Workload


class Measured(NamedTuple):
    """Peak of allocated memory and median step of a run of tools/benchmark_train.py with compiled blocks; the median
    over machines if a page has several."""

    preset: str
    batch: int
    """Samples per micro-batch."""
    length: int
    peak_gib: float
    step_seconds: float
    axes: str = ""
    dp: int = 1
    micro_batches: int = 1
    vocab_size: int | None = None
    recompute: bool = False
    cuda_graphs: bool = False
    """True if the step is launched as one graph, which removes the plan's host time."""
    stages: tuple[int, ...] = ()
    """Sub-layers of each pipeline stage in the measured run."""
    sequence_parallel: Literal["none", "symmetric_memory"] | None = None
    """parallel.tp_overlap with sequence parallelism; None: without it."""
    simulated: bool = False
    """Measured with --simulated-ranks: collectives copy the rank's own tensors and wait for nothing."""
    float8: Float8Settings | None = None
    """Choice of the FP8 matmuls."""
    gpu: Literal["h100", "h200"] = "h200"

    def name(self) -> str:
        """Label of the row."""
        parts = [f"{self.micro_batches} x {self.batch} x {self.length}", self.axes, "recompute" * self.recompute]
        parts += [
            {None: "", "none": "sequence parallel", "symmetric_memory": "async tensor parallel"}[
                self.sequence_parallel
            ],
            "CUDA graph" * self.cuda_graphs,
            "simulated rank" * self.simulated,
            "" if self.float8 is None else "FP8" + ", gradients of weights too" * self.float8.weight_gradient,
            " + ".join(map(str, self.stages)) + " sub-layers" * bool(self.stages),
            "H100" * (self.gpu == "h100"),
        ]
        return ", ".join([self.preset, *filter(None, parts)]) + (f", dp {self.dp}" if self.dp > 1 else "")

    def estimate(self) -> Estimate:
        """The planner's estimate."""
        model = load_preset(self.preset).model
        if self.vocab_size is not None:
            model = model.model_copy(update={"vocab_size": self.vocab_size})
        axes: dict[str, Any] = {
            name: int(size) for name, size in (axis.split() for axis in self.axes.split(", ") if axis)
        }
        if "pp_stages_per_rank" in axes:
            axes["pp_schedule"] = "interleaved"
        if self.sequence_parallel is not None:
            axes |= {"sequence_parallel": True, "tp_overlap": self.sequence_parallel}
        layout = ParallelLayout(ParallelConfig(**axes), self.dp, self.batch, self.micro_batches, self.recompute)
        samples = self.batch * self.micro_batches * self.dp
        workload = Workload(model, self.length, samples, torch.bfloat16, True, float8=self.float8)
        estimator = Estimator(workload, HARDWARE[self.gpu])
        if self.stages:
            bounds = itertools.pairwise([0, *itertools.accumulate(self.stages)])
            estimator.partitions[layout.parallel.pp, len(self.stages)] = [range(start, end) for start, end in bounds]
        return estimator.estimate(layout, refined=True)

    def compared(self) -> tuple[float, float]:
        """Planned GiB and seconds, comparable with the measured ones: without symmetric memory, which the allocator
        does not count, and without waits that the run did not have."""
        memory, time = self.estimate()[1:3]
        missing = self.cuda_graphs * time.host + self.simulated * (time.collectives + time.data_parallel)
        return (memory.total - memory.symmetric_memory) / 2**30, time.total - missing


FLOAT8, ALL_FLOAT8 = Float8Settings(), Float8Settings(weight_gradient=True)
ROWS = [
    Measured("gla-1.3b", 2, 8192, 54.4, 0.2738, cuda_graphs=True, gpu="h100"),
    Measured("rodimus_plus-1.6b", 2, 8192, 66.0, 0.3836, cuda_graphs=True, gpu="h100"),
    Measured("rodimus-1.3b", 2, 8192, 69.2, 0.3390, cuda_graphs=True, gpu="h100"),
    Measured("mamba2-1b", 2, 8192, 65.0, 0.3346, cuda_graphs=True, gpu="h100"),
    Measured("retnet-1.3b", 2, 8192, 49.3, 0.2733, cuda_graphs=True, gpu="h100"),
    Measured("hgrn2-1b", 2, 8192, 43.6, 0.2129, cuda_graphs=True, gpu="h100"),
    Measured("llama-1b", 2, 8192, 40.5, 0.2795, cuda_graphs=True, gpu="h100"),
    Measured("cosformer2-1b", 2, 8192, 48.9, 0.2306, cuda_graphs=True, gpu="h100"),
    Measured("tnl-1b", 2, 8192, 45.6, 0.2153, cuda_graphs=True, gpu="h100"),
    Measured("transnormerllm-1b", 2, 8192, 36.3, 0.1960, cuda_graphs=True, gpu="h100"),
    Measured("gla-1.3b", 2, 8192, 54.4, 0.2617, cuda_graphs=True),
    Measured("rodimus_plus-1.6b", 2, 8192, 66.0, 0.3642, cuda_graphs=True),
    Measured("rodimus-1.3b", 2, 8192, 69.2, 0.3287, cuda_graphs=True),
    Measured("mamba2-1b", 2, 8192, 65.0, 0.3218, cuda_graphs=True),
    Measured("retnet-1.3b", 2, 8192, 49.3, 0.2649, cuda_graphs=True),
    Measured("hgrn2-1b", 2, 8192, 43.6, 0.2102, cuda_graphs=True),
    Measured("llama-1b", 2, 8192, 40.5, 0.2776, cuda_graphs=True),
    Measured("cosformer2-1b", 2, 8192, 48.9, 0.2198, cuda_graphs=True),
    Measured("tnl-1b", 2, 8192, 45.6, 0.2107, cuda_graphs=True),
    Measured("transnormerllm-1b", 2, 8192, 36.3, 0.1908, cuda_graphs=True),
    Measured("transnormerllm-1b-64k", 4, 8192, 55.0, 0.3442, vocab_size=50304),
    Measured("tnl-1b", 4, 8192, 75.8, 0.4101),
    Measured("mamba2-1b", 4, 8192, 110.8, 0.6462),
    Measured("rodimus-1.3b", 4, 8192, 119.6, 0.6599),
    Measured("transnormerllm-1b-64k", 4, 8192, 55.8, 0.2894, vocab_size=50304, float8=FLOAT8),
    Measured("transnormerllm-1b-64k", 4, 8192, 47.2, 0.2824, vocab_size=50304, float8=ALL_FLOAT8),
    Measured("tnl-1b", 4, 8192, 75.8, 0.3530, float8=FLOAT8),
    Measured("llama-1b", 4, 8192, 66.4, 0.5271, float8=FLOAT8),
    Measured("transnormerllm-7b-64k", 1, 32768, 110.4, 2.1387, recompute=True, float8=FLOAT8),
    Measured("transnormerllm-7b-64k", 1, 32768, 109.7, 1.9982, recompute=True, float8=ALL_FLOAT8),
    Measured("mamba2-1b", 1, 32768, 111.2, 0.6309),
    Measured("rodimus-1.3b", 1, 32768, 119.6, 0.6338),
    Measured("mamba2-1b", 1, 65536, 103.8, 0.6388, "cp 2, zero 2", simulated=True),
    Measured("rodimus-1.3b", 1, 65536, 112.0, 0.6224, "cp 2, zero 2", simulated=True),
    Measured("transnormerllm-1b-64k", 1, 65536, 51.0, 0.3635, "cp 2, zero 2", simulated=True),
    Measured("llama-1b", 4, 8192, 66.4, 0.5761),
    Measured("llama-1b", 1, 32768, 19.3, 1.3487, recompute=True),
    Measured("llama-1b", 1, 65536, 6.4, 1.2337, "cp 4", recompute=True),
    Measured("llama-1b", 1, 262144, 13.9, 15.7987, "cp 4", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 32768, 55.8, 0.3625),
    Measured("transnormerllm-1b-64k", 1, 65536, 48.2, 0.4042, "cp 2"),
    Measured("transnormerllm-1b-64k", 1, 65536, 51.0, 0.3956, "cp 2, zero 2"),
    Measured("transnormerllm-1b-64k", 1, 65536, 11.9, 0.5186, "cp 2", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 1048576, 90.0, 7.6229, "cp 2", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 131072, 45.4, 0.3960, "cp 4"),
    Measured("transnormerllm-1b-64k", 1, 131072, 47.1, 0.3878, "cp 4, zero 2"),
    Measured("transnormerllm-1b-64k", 1, 65536, 6.5, 0.2911, "cp 4", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 65536, 8.0, 0.2603, "cp 4, zero 2", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 262144, 14.1, 0.9791, "cp 4", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 1048576, 45.4, 3.7998, "cp 4", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 1048576, 49.7, 3.7878, "cp 4, zero 2", recompute=True),
    Measured("transnormerllm-1b-64k", 1, 2883584, 118.5, 10.3402, "cp 4", recompute=True),
    Measured("transnormerllm-1b-64k", 4, 8192, 45.3, 0.3824, dp=4),
    Measured("transnormerllm-1b-64k", 4, 8192, 32.7, 0.2160, "tp 2"),
    Measured("transnormerllm-1b-64k", 4, 8192, 30.6, 0.2292, "tp 2", sequence_parallel="none"),
    Measured("transnormerllm-1b-64k", 4, 8192, 28.6, 0.2069, "tp 2", sequence_parallel="symmetric_memory"),
    Measured("transnormerllm-1b-64k", 4, 8192, 32.7, 0.2138, "tp 2", cuda_graphs=True),
    Measured(
        "transnormerllm-1b-64k", 4, 8192, 28.6, 0.1977, "tp 2", sequence_parallel="symmetric_memory", cuda_graphs=True
    ),
    Measured("transnormerllm-7b-64k", 2, 2048, 109.9, 0.3806, cuda_graphs=True),
    Measured("transnormerllm-7b-64k", 1, 32768, 108.7, 2.9644, recompute=True),
    Measured("transnormerllm-7b-64k", 1, 65536, 59.5, 3.1815, "cp 2", recompute=True),
    Measured("transnormerllm-7b-64k", 1, 131072, 35.7, 3.1218, "cp 4", recompute=True),
    Measured("transnormerllm-7b-64k", 1, 917504, 118.1, 20.7142, "cp 4", recompute=True),
    Measured("transnormerllm-7b-64k", 2, 2048, 57.2, 0.2107, "tp 2", cuda_graphs=True),
    Measured("transnormerllm-7b-64k", 2, 2048, 56.4, 0.2200, "tp 2", sequence_parallel="none", cuda_graphs=True),
    Measured(
        "transnormerllm-7b-64k", 2, 2048, 55.2, 0.2039, "tp 2", sequence_parallel="symmetric_memory", cuda_graphs=True
    ),
    Measured("transnormerllm-7b-64k", 2, 2048, 57.2, 0.2137, "tp 2"),
    Measured("transnormerllm-7b-64k", 2, 2048, 56.4, 0.2228, "tp 2", sequence_parallel="none"),
    Measured("transnormerllm-7b-64k", 2, 2048, 55.2, 0.2292, "tp 2", sequence_parallel="symmetric_memory"),
    Measured("transnormerllm-7b-64k", 2, 2048, 30.7, 0.1180, "tp 4", cuda_graphs=True),
    Measured("transnormerllm-7b-64k", 2, 2048, 30.6, 0.1643, "tp 4"),
    Measured("transnormerllm-1b-64k", 2, 4096, 28.3, 98304 / 84622, micro_batches=12),
    Measured("transnormerllm-1b-64k", 2, 4096, 23.1, 0.8392, "pp 2", micro_batches=16, stages=(18, 14)),
    Measured(
        "transnormerllm-1b-64k", 2, 4096, 17.7, 98304 / 66029 / 4, "pp 4", micro_batches=12, stages=(8, 10, 10, 4)
    ),
    Measured("transnormerllm-1b-64k", 2, 4096, 19.0, 1.1069, "pp 4", micro_batches=40, stages=(9, 9, 9, 5)),
    Measured("transnormerllm-1b-64k", 2, 4096, 19.0, 2.1659, "pp 4", micro_batches=80, stages=(9, 9, 9, 5)),
    Measured(
        "transnormerllm-1b-64k",
        2,
        4096,
        23.7,
        2.2057,
        "pp 4, pp_stages_per_rank 2",
        micro_batches=80,
        stages=(4, 4, 5, 3, 5, 5, 5, 1),
    ),
]


def table() -> str:
    """Formats the rows as Markdown."""
    lines = [
        "| run | GiB measured | planned | error | ms measured | planned | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        peak, seconds = row.compared()
        lines.append(
            f"| {row.name()} | {row.peak_gib:.1f} | {peak:.1f} | {peak / row.peak_gib - 1:+.1%} "
            f"| {row.step_seconds * 1e3:.0f} | {seconds * 1e3:.0f} | {seconds / row.step_seconds - 1:+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
