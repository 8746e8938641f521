"""Gloo ranks for multi-rank tests, forked from a process that has already imported the common modules."""

import pkgutil
import re
import warnings
from functools import partial
from typing import Any

from megalin.errors import RankFailedError
from megalin.layers import mixers
from megalin.parallel import ranks

__all__ = ["RankFailedError", "run_ranks"]

# None of these imports a Triton kernel of megalin, which would fix whether kernels are interpreted.
_PRELOAD = (
    "tests.rare_collections",
    "pytest",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "torch._inductor.compile_fx",
    "megalin.train.loop",
    "megalin.verify.run",
    "tests.cases",
    "tests.encoder_cases",
    # The modules of layers and ops that models import when they are built.
    *(module.name for module in pkgutil.iter_modules(mixers.__path__, f"{mixers.__name__}.")),
    "megalin.layers.lrpe_segments",
    "pydantic.type_adapter",
    "rich._emoji_codes",
    "torch.profiler._cupti_monitor",
    "tests.model_runs",
    "tests.warm_start",
    "tests.numerics",
    "tests.parallel.on_ranks",
    # Read by the commands of tools/faults.py, some of them without the rights to Python's files.
    "encodings.ascii",
    "encodings.idna",
    "megalin.__main__",
    "megalin.commands.train",
    "megalin.data.tokenizers.tokenizer",
)
_run_ranks = partial(ranks.run_ranks, preload=_PRELOAD)


def fork_context() -> Any:
    """The multiprocessing context whose processes are forked where ranks are: for processes without a process group."""
    ranks._context.set_forkserver_preload([*_PRELOAD, *ranks._PRELOAD])
    return ranks._context


def run_ranks(world_size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
    """`ranks.run_ranks`, once more where a rank died of heap corruption.

    In torch 2.13 the memory that a thread of gloo allocates from is corrupt about once in a thousand groups of ranks
    (backtraces: malloc, called in ProcessGroupGloo::runLoop). A rank that dies in the second group too is a failure.
    """
    try:
        return _run_ranks(world_size, function, *args, **options)
    except RankFailedError as error:
        if not re.search(r"died: -(6|11)\b", str(error)):
            raise
        warnings.warn(f"called again, as a rank died of a signal: {error}", RuntimeWarning, stacklevel=2)
    return _run_ranks(world_size, function, *args, **options)
