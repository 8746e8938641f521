"""What multi-rank tests run on: `megalin verify`'s own ranks, gloo processes that are cheap to start."""

from megalin.errors import RankFailedError
from megalin.parallel.ranks import run_ranks

__all__ = ["RankFailedError", "run_ranks"]
