"""Comparison of every mesh of at most a given number of ranks with one process, one mesh at a time."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from megalin.errors import ConfigError, RankFailedError
from megalin.parallel.config import ParallelConfig
from megalin.verify.case import Case
from megalin.verify.comparison import TensorError
from megalin.verify.run import mesh_name, row_json, summary, worst_first

SIZES = (1, 2, 3, 4)
"""Numbers of ranks of an axis."""

AXES = ("tp", "cp", "pp", "dp")
"""The axes of a mesh."""

Verify = Callable[[Case], list[TensorError]]


class GridMesh(NamedTuple):
    """Mesh of the grid."""

    parallel: ParallelConfig
    data_size: int
    """Groups of ranks that read different samples, dp."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """Number of ranks of each axis."""
        return dict(zip(AXES, (self.parallel.tp, self.parallel.cp, self.parallel.pp, self.data_size), strict=True))


class MeshResult(NamedTuple):
    """Result of one mesh of the grid."""

    layout: GridMesh
    refused: str
    """Reason why the model cannot run on the mesh; empty if it was started."""
    failed: str
    """Error of ranks that failed; empty otherwise."""
    num_tensors: int
    worst: TensorError | None
    """Tensor with the largest error in units of its bound."""
    seconds: float

    @property
    def passed(self) -> bool:
        """True if every tensor is within its bound, or the model does not support the mesh."""
        return not self.failed and (self.worst is None or self.worst.passed)


def layouts(max_ranks: int) -> list[GridMesh]:
    """All combinations of axes of 1 to 4 ranks that fit, the smallest first; for meshes of one or two axes also each
    option of an axis: sequence parallelism, state exchanges, schedules, ZeRO stages."""
    found = []
    axes = [sizes for sizes in itertools.product(SIZES, repeat=4) if math.prod(sizes) <= max_ranks]
    for tp, cp, pp, dp in sorted(axes, key=math.prod):
        options = _options(tp, cp, pp, dp) if sum(size > 1 for size in (tp, cp, pp, dp)) <= 2 else []
        found += [GridMesh(ParallelConfig(tp=tp, cp=cp, pp=pp, **option), dp) for option in [{}, *options]]
    return found


def _options(tp: int, cp: int, pp: int, dp: int) -> list[dict[str, Any]]:
    """The options other than the defaults on a mesh of these axes, one at a time."""
    options: list[dict[str, Any]] = []
    if tp > 1:
        options.append({"sequence_parallel": True})
    if cp > 1:
        options.append({"cp_exchange": "ring"})
    if pp > 1:
        options += [{"pp_schedule": "interleaved", "pp_stages_per_rank": 2}, {"pp_schedule": "zero_bubble"}]
    if dp > 1:
        options += [{"zero": stage} for stage in ((0,) if pp > 1 else (0, 1, 2))]
    return options


def run_grid(
    layouts: Iterable[GridMesh], make: Callable[[GridMesh], Case], verify: Verify, *, new_ranks: bool
) -> Iterator[MeshResult]:
    """Yields the result of each mesh in turn.

    Args:
        make: builds the comparison on a mesh; its ConfigError is the reason why the model cannot run there.
        verify: `verify.run.verify` on the ranks of the case.
        new_ranks: True if `verify` starts new ranks for each mesh, so that failed ranks do not affect the next mesh.

    Raises:
        RankFailedError: from `verify`, with the mesh named, if all meshes share their ranks.
    """
    for layout in layouts:
        started = time.monotonic()
        rows, refused, failed = [], "", ""
        try:
            case = make(layout)
        except ConfigError as error:
            refused = str(error)
        else:
            try:
                rows = verify(case)
            except RankFailedError as error:
                if not new_ranks:
                    raise type(error)(f"{mesh_name(*layout)}: {error}") from error
                failed = str(error)
        worst = worst_first(rows)[0] if rows else None
        yield MeshResult(layout, refused, failed, len(rows), worst, time.monotonic() - started)


def print_grid(results: Iterator[MeshResult], *, as_json: bool) -> bool:
    """Prints one line per finished mesh, or one JSON object at the end; returns True if at least one mesh ran and all
    that ran passed. Also lists the axes for which no mesh ran: nothing is verified for these."""
    started, found = time.monotonic(), []
    if not as_json:
        print(f"{'mesh':48} {'':11} {'error':8} {'bound':6} {'seconds':>7}  worst tensor, or reason")
    for result in results:
        found.append(result)
        if not as_json:
            print(_line(result), flush=True)
    ran = [result for result in found if not result.refused]
    passed = bool(ran) and all(result.passed for result in ran)
    covered = {axis for result in ran for axis, size in result.layout.sizes().items() if size > 1 and not result.failed}
    missing = [axis for axis in AXES if axis not in covered]
    if as_json:
        meshes = [_as_json(result) for result in found]
        print(json.dumps({"passed": passed, "axes_not_run": missing, "meshes": meshes}))
        return passed
    failed = sum(not result.passed for result in ran)
    print(
        f"{'PASSED' if passed else 'FAILED'}: {len(ran) - failed} of {len(ran)} meshes agree with one process, "
        f"{len(found) - len(ran)} refused, {time.monotonic() - started:.0f} s"
        + (f"; no mesh ran with {' or '.join(missing)} above 1" if missing else "")
    )
    return passed


def _line(result: MeshResult) -> str:
    name = mesh_name(*result.layout)
    row = result.worst
    if row is None:
        word, reason = ("FAILED", result.failed) if result.failed else ("refused", result.refused)
        return f"{name:48} {word:11} {'':8} {'':6} {result.seconds:7.1f}  {reason}"
    verdict = "ok" if row.passed else "FAILED"
    return f"{name:48} {verdict:11} {row.error:<8.1e} {row.bound:<6.0e} {result.seconds:7.1f}  {row.name}"


def _as_json(result: MeshResult) -> dict[str, Any]:
    row = result.worst
    return summary(*result.layout) | {
        "passed": result.passed,
        "refused": result.refused or None,
        "failed": result.failed or None,
        "tensors": result.num_tensors,
        "worst": None if row is None else row_json(row),
        "seconds": result.seconds,
    }
