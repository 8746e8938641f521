"""Check before the first update of a run that all ranks compute with the same kernels."""

from __future__ import annotations

from megalin.errors import KernelError
from megalin.ops.dispatch.backend import self_tests
from megalin.parallel.agreement import on_every_rank, world_size


def check_same_self_tests() -> None:
    """Compares the results of kernels' self-tests over the ranks: ranks that computed with other kernels would drift
    apart. Called once, after the first gradients and before the first update. One message (two all-gathers).

    Raises:
        KernelError: on every rank, if a kernel passes on some ranks only; names them, the kernel and the error.
    """
    if world_size() == 1:
        return
    results = on_every_rank(self_tests, dict[str, str])
    for kernel in sorted({kernel for tested in results for kernel in tested}):
        errors = {rank: tested[kernel] for rank, tested in enumerate(results) if kernel in tested}
        failed = [rank for rank, error in errors.items() if error]
        if failed and len(failed) < len(errors):
            passed = next(rank for rank, error in errors.items() if not error)
            op = kernel.partition("=")[0]
            raise KernelError(
                f"the kernel {kernel} fails on rank {failed[0]} ({errors[failed[0]]}), {len(failed)} of {len(errors)} "
                f"ranks with this call, but passes on rank {passed}; all ranks must compute with the same kernels: "
                f"replace or restart the failing GPU, or set MEGALIN_KERNELS={op}=reference on all ranks"
            )
