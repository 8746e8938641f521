"""What multi-rank tests run on: gloo ranks forked from a process that has loaded what they all import."""

from functools import partial

from megalin.errors import RankFailedError
from megalin.parallel import ranks

__all__ = ["RankFailedError", "run_ranks"]

# None of them imports a Triton kernel of megalin's, which would settle whether the kernels are interpreted.
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
