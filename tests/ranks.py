"""Gloo ranks for multi-rank tests, forked from a process that has already imported the common modules."""

from functools import partial

from megalin.errors import RankFailedError
from megalin.parallel import ranks

__all__ = ["RankFailedError", "run_ranks"]

# None of these imports a Triton kernel of megalin, which would fix whether kernels are interpreted.
run_ranks = partial(
    ranks.run_ranks,
    preload=(
        "pytest",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "torch._inductor.compile_fx",
        "megalin.train.loop",
        "megalin.verify.run",
        "tests.cases",
        "tests.encoder_cases",
    ),
)
