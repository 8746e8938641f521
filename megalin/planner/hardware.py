"""What a plan knows of GPUs: data sheets, and which share of them our steps were seen to reach."""

from __future__ import annotations

from typing import NamedTuple

from megalin.config import suggest
from megalin.errors import ConfigError
from megalin.train.hardware import BF16_FLOPS_PER_SECOND

MATRIX_SHARE = 0.69
"""Of the data sheet's matrix rate: 680 of 989 TFLOP/s at 8192^3 and at the models' own shapes, H200."""
ATTENTION_SHARE = 0.48
"""Of the data sheet's matrix rate, causal softmax attention with its backward counted as two forwards: 28.0 ms for
3 x 4.4 TFLOP, cuDNN, 32,768 tokens and 16 heads of 128, H200."""
MEMORY_SHARE = 0.60
"""Of the data sheet's bandwidth, kernels beside matrix products: between 0.4 (scans) and 0.85 (norms, gates), H200. One
number for all of them is what the estimate's error is made of."""
LINK_SHARE = 0.67
"""Of a link's data sheet, large collectives: 292 to 329 of 450 GB/s, four H200. Taken for the network as well."""
COLLECTIVE_SECONDS = 36e-6
"""Least time of a collective, four H200 of one host."""
COPY_SHARE = 0.84
"""Of a link's data sheet, a copy engine that writes into another GPU: 378 of 450 GB/s, 33.5 MB, two H200."""
SIGNAL_SECONDS = 16e-6
"""What a copy to other ranks takes beside its bytes: a signal between two copies of one stream, two H200."""
HOST_SECONDS = 5e-3
"""What the host needs to start one block forward and backward: 150 ms for 30 blocks; a faster device waits for it."""


class Hardware(NamedTuple):
    """A GPU in the machine that it usually comes in, by the vendor's data sheets."""

    name: str
    memory_bytes: int
    matrix_flops: float
    """Dense bf16 operations a second."""
    memory_bandwidth: float
    """Bytes a second, read and written together."""
    link_bandwidth: float
    """Bytes a second that a GPU sends to the others of its host (NVLink, one direction)."""
    network_bandwidth: float
    """Bytes a second that a GPU sends to other hosts: one adapter each, 400 Gb/s, of an A100 200 Gb/s."""


CHIPS = {
    chip.name: chip
    for chip in (
        Hardware("a100", 80 * 10**9, BF16_FLOPS_PER_SECOND["A100"], 2.039e12, 300e9, 25e9),
        Hardware("h100", 80 * 10**9, BF16_FLOPS_PER_SECOND["H100"], 3.35e12, 450e9, 50e9),
        Hardware("h200", 141 * 10**9, BF16_FLOPS_PER_SECOND["H200"], 4.8e12, 450e9, 50e9),
        Hardware("b200", 180 * 10**9, BF16_FLOPS_PER_SECOND["B200"], 7.7e12, 900e9, 50e9),
    )
}
"""The chips that a plan knows: SXM boards, 8 of them on a host."""
GPUS_PER_HOST = 8


def chip_named(name: str) -> Hardware:
    """The chip of that name. Raises ConfigError for one that is not known."""
    if name not in CHIPS:
        raise ConfigError(f"--gpu {name}: no data sheet of it is known here; {suggest(name, list(CHIPS))}")
    return CHIPS[name]
