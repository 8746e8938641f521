"""Programmatic dependent launch (compute capability 9.0 and above): a kernel starts while the one before it ends.

A kernel launched so may first read only memory that no recent kernel wrote, such as weights; `wait_for_inputs` then
waits until the kernel before it has completed, and lets the one after it start. Since every kernel waits before it lets
the next one start, all but the last two have completed by then. In a CUDA graph it must follow a kernel, not a copy.
"""

from __future__ import annotations

import functools

import torch

import triton
import triton.language as tl


@functools.cache
def dependent_launch() -> dict[str, bool]:
    """Launch options and the constant PDL of such a kernel on this machine."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
