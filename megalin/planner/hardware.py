"""GPUs of a plan: data sheets, and the fractions of them that steps were measured to reach."""

from __future__ import annotations

from typing import NamedTuple

from megalin.config import suggest
from megalin.errors import ConfigError
from megalin.train.hardware import BF16_FLOPS_PER_SECOND

MATRIX_EFFICIENCY = 0.69
"""Fraction of the data sheet's matrix rate: 680 of 989 TFLOP/s at 8192^3 and at the models' own shapes, H200."""
FLOAT8_SPEEDUP = 1.83
"""Rate of FP8 matmuls over that of bf16 ones: 1.76 to 1.85 at the models' own shapes, H100."""
ATTENTION_EFFICIENCY = 0.48
"""Fraction of the data sheet's matrix rate for causal softmax attention, its backward counted as two forwards: 28.0 ms
for 3 x 4.4 TFLOP, cuDNN, 32,768 tokens and 16 heads of 128, H200."""
LINK_EFFICIENCY = 0.67
"""Fraction of a link's data sheet for large collectives: 292 to 329 of 450 GB/s, four H200. Used for networks too."""
COLLECTIVE_SECONDS = 36e-6
"""Shortest time of a collective, four H200 of one host."""
COPY_EFFICIENCY = 0.84
"""Fraction of a link's data sheet for a copy engine that writes to another GPU: 378 of 450 GB/s, 33.5 MB, two H200."""
SIGNAL_SECONDS = 16e-6
"""Overhead of a copy to other ranks: a signal between two copies on one CUDA stream, two H200."""
HOST_SECONDS = 5e-3
"""Host time to launch one block forward and backward: 150 ms for 30 blocks; a faster device waits for it."""


class Hardware(NamedTuple):
    """A GPU and the host that it is usually part of, by the vendor's data sheets."""

    name: str
    memory_bytes: int
    matrix_flops: float
    """Dense bf16 operations a second."""
    memory_bandwidth: float
    """Bytes a second, read and written together."""
    memory_efficiency: float
    """Fraction of `memory_bandwidth` at which all kernels except matmuls move their bytes. H100 and H200: fitted to
    steps of ten models each (docs/planner.md), so that it makes up for errors of the other rates too; others: that of
    the H200. One number for all kernels, from 0.4 (scans, H200) to 0.88 (copies), is the estimate's main error."""
    link_bandwidth: float
    """Bytes a second that a GPU sends to the others of its host (NVLink, one direction)."""
    network_bandwidth: float
    """Bytes a second that a GPU sends to other hosts: one adapter per GPU, 400 Gb/s (A100: 200 Gb/s)."""
    capability: tuple[int, int]
    """CUDA compute capability."""


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100", 80 * 10**9, BF16_FLOPS_PER_SECOND["A100"], 2.039e12, 0.73, 300e9, 25e9, (8, 0)),
        Hardware("h100", 80 * 10**9, BF16_FLOPS_PER_SECOND["H100"], 3.35e12, 0.94, 450e9, 50e9, (9, 0)),
        Hardware("h200", 141 * 10**9, BF16_FLOPS_PER_SECOND["H200"], 4.8e12, 0.73, 450e9, 50e9, (9, 0)),
        Hardware("b200", 180 * 10**9, BF16_FLOPS_PER_SECOND["B200"], 7.7e12, 0.73, 900e9, 50e9, (10, 0)),
    )
}
"""Known GPUs by name: SXM boards, 8 on a host."""
GPUS_PER_HOST = 8


def hardware_named(name: str) -> Hardware:
    """Returns the hardware of that name. Raises ConfigError for an unknown one."""
    if name not in HARDWARE:
        raise ConfigError(f"--gpu {name}: unknown GPU model; {suggest(name, list(HARDWARE))}")
    return HARDWARE[name]
