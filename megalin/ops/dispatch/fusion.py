"""Choice of the ops that stay plain PyTorch in a block compiled by torch.compile, for inductor to fuse."""

from __future__ import annotations

import torch

from megalin.ops.dispatch.backend import Backend, compilation_assumed, requested
from megalin.ops.dispatch.compile_constants import assume_constant_result


def left_to_inductor(op: str, backend: Backend) -> bool:
    """True where a norm uses its PyTorch reference so that inductor can fuse it with the additions, gates and casts
    around it: under torch.compile, with `backend` "auto" and no choice for `op` in MEGALIN_KERNELS.

    An explicit backend, or one that MEGALIN_KERNELS sets, keeps its kernel, which ends the fusion. For norms whose
    reference reads its input once, the lost fusion costs more than the kernel gains (figures in docs/benchmarks/).
    """
    return (torch.compiler.is_compiling() or compilation_assumed()) and is_auto(op, backend)


@assume_constant_result
def is_auto(op: str, backend: Backend) -> bool:
    """Whether neither the call nor MEGALIN_KERNELS sets the backend of an op."""
    return backend == "auto" and requested(op) == "auto"
