"""Verification on the ranks of the current process group, with results as a table or JSON."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

import rich.console
import rich.table
import torch

from megalin.layers.mixer_configs.glu import GLUConfig
from megalin.layers.mixer_configs.tnl import TNLConfig
from megalin.model.config import BlockConfig
from megalin.ops.choices import ALIGNMENT
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.messages import gather_values
from megalin.parallel.process_group import compute_device
from megalin.terminal_output import terminal
from megalin.verify.case import Case
from megalin.verify.comparison import Rounding, TensorError, compare, kind
from megalin.verify.decoding import compare_decoding
from megalin.verify.faults import ExchangeKind, Fault, Probe, visible_faults
from megalin.verify.float8 import CODES, SCALES, count_planned, count_recorded
from megalin.verify.outcome import Outcome, on_host, run_on_mesh, run_reference, run_step, run_stepped
from megalin.verify.rounding import measure_fp32, measure_rounding
from megalin.verify.single_layers import SINGLE, compare_layers

_log = logging.getLogger(__name__)


IN_BF16 = "bf16_"
"""Prefix of the rows of a model with FP8 matmuls that computes all else in bf16, whose bounds are wide."""


class FaultResult(NamedTuple):
    """Detection of a planted fault: whether it was found, and the tensor with the largest error over bound."""

    fault: str
    seen: bool
    worst: TensorError


class Reference(NamedTuple):
    """Outcome of one process, and in bf16 its measured rounding."""

    outcome: Outcome
    rounding: Rounding | None


def verify(case: Case, mesh: Mesh | None = None) -> list[TensorError]:
    """Compares the case on the mesh of the current process group with one process; a collective. In fp32, if a bound is
    exceeded, the truth becomes one process in fp64, and bounds are twice the error of the one in fp32. In FP8 also each
    layer by itself, and the whole model, in bf16. Of decoders also the logits of decoding.

    Args:
        mesh: a mesh of `case.parallel` for several cases to share, because its process groups cost time and threads.

    Returns:
        One row per tensor on rank 0; no rows on the other ranks.
    """
    mesh = Mesh(case.parallel, compute_device()) if mesh is None else mesh
    assert mesh.config == case.parallel, (mesh.config, case.parallel)
    rows = compare_models(case, mesh) + compare_decoding(case, mesh)
    if case.float8 is not None:
        rows += compare_layers(case, mesh)
        in_bf16 = compare_models(case._replace(dtype="bfloat16"), mesh)
        rows += [row._replace(name=f"{IN_BF16}{row.name}") for row in in_bf16]
    return rows


def compare_models(case: Case, mesh: Mesh) -> list[TensorError]:
    """The rows of the whole model in the dtype of the case; a collective."""
    outcome = run_on_mesh(case, mesh)
    if not mesh.is_first_rank:
        return []
    reference = _reference(case, mesh.device)
    rows = _compare(case, outcome, reference, mesh.device)
    if case.dtype == "float32" and not all(row.passed for row in rows):
        # The bound is for shrunk models; rounding grows with depth.
        try:
            truth, rounding = measure_fp32(case, reference.outcome, mesh.device)
        except torch.OutOfMemoryError:
            _log.warning("float32 bounds stay unchanged: one process in float64 does not fit in memory")
            return rows
        return compare(case, outcome, truth, rounding, mesh.device)
    return rows


def self_test(case: Case) -> list[FaultResult]:
    """Plants each fault of faults.py that is visible with the mesh and the model, and compares; each must be found.
    A collective; results on rank 0."""
    results = []
    references: dict[bool, Reference] = {}
    for fault in visible_faults(case, _exchanges(case)):
        planted = with_low_rank(case) if fault.needs_low_rank else case
        mesh = fault.mesh(
            case.parallel,
            compute_device(),
            tensor_parallel=fault.tensor_parallel,
            context_parallel=fault.context_parallel,
            pipeline_parallel=fault.pipeline_parallel,
        )
        if fault.decoding is not None:
            if rows := compare_decoding(planted, mesh, fault.decoding):
                results.append(_fault_result(fault, rows))
            continue
        outcome = run_on_mesh(planted, mesh, after_init=fault.after_init)
        if mesh.is_first_rank:
            if fault.needs_low_rank not in references:
                references[fault.needs_low_rank] = _reference(planted, mesh.device)
            rows = _compare(planted, outcome, references[fault.needs_low_rank], mesh.device)
            results.append(_fault_result(fault, rows))
    return results


def _fault_result(fault: Fault, rows: list[TensorError]) -> FaultResult:
    return FaultResult(fault.name, not all(row.passed for row in rows), worst_first(rows)[0])


def _exchanges(case: Case) -> set[ExchangeKind]:
    """Kinds of communication over the context-parallel axis of the model's layers, on any rank."""
    mesh = Mesh(case.parallel, compute_device(), context_parallel=Probe)
    assert isinstance(mesh.cp, Probe), mesh.cp
    if mesh.cp.size > 2:
        run_on_mesh(case, mesh)
    if mesh.pp.size == 1:
        return mesh.cp.made
    return set[ExchangeKind]().union(*gather_values(mesh.cp.made, mesh.pp.group, set[ExchangeKind]))


def with_low_rank(case: Case) -> Case:
    """The decoder's case with tied embeddings and one more block, which has a replicated weight on sharded data in case
    the model has none."""
    num_heads = max(4, 2 * case.parallel.tp)
    width = case.model.hidden_size
    wider = num_heads if case.float8 is None else ALIGNMENT * case.parallel.tp
    sublayers = [TNLConfig(num_heads=num_heads, chunk_size=16), GLUConfig(intermediate_size=width + wider)]
    block = BlockConfig(sublayers=list(sublayers))
    update = {"layers": [*case.model.layers, block], "tie_embeddings": True}
    return case._replace(model=case.model.model_copy(update=update))


def _reference(case: Case, device: torch.device) -> Reference:
    if case.is_half:
        truth = on_host(run_reference(case, torch.float32, device))
        return Reference(truth, measure_rounding(case, truth, device))
    return Reference(on_host(run_reference(case, case.compute_dtype, device)), None)


def _compare(case: Case, outcome: Outcome, reference: Reference, device: torch.device) -> list[TensorError]:
    truth = reference.outcome
    if case.dtype == "float8":
        # Rounding of small gradients is amplified by AdamW and could move a code: from the same weights none moves.
        truth = truth | run_stepped(case, outcome, device)
    if reference.rounding is not None:
        # The sign of a gradient element near zero is rounding, and AdamW's first step moves its weight by twice lr.
        # The gradients have their own rows; the optimizer step from them is exact.
        truth = truth | run_step(case, outcome, device)
    rows = compare(case, outcome, truth, reference.rounding, device)
    if case.dtype == "float8":
        missing = count_planned(case).matmuls - count_recorded(outcome).matmuls
        rows.append(TensorError("missing_matmuls", float(missing), 0.0))
    return rows


def worst_first(rows: list[TensorError]) -> list[TensorError]:
    """Rows sorted by error over bound, the largest first; a NaN counts as the largest."""
    return sorted(rows, key=lambda row: -row.ratio if row.error == row.error else float("-inf"))


def print_rows(case: Case, rows: list[TensorError], *, as_json: bool) -> bool:
    """Prints the comparison; returns whether every bound holds."""
    passed = all(row.passed for row in rows)
    if as_json:
        print(json.dumps({"passed": passed, **_summary(case), "rows": [row_json(row) for row in rows]}))
        return passed
    table = rich.table.Table("tensor", "of", "worst error", "bound", "", title=_title(case))
    for group in dict.fromkeys(kind(row.name) for row in rows):
        of_kind = worst_first([row for row in rows if kind(row.name) == group])
        for row in of_kind if not all(row.passed for row in of_kind) else of_kind[:1]:
            table.add_row(
                row.name, str(len(of_kind)), f"{row.error:.2e}", f"{row.bound:.0e}", "ok" if row.passed else "FAILED"
            )
    console = rich.console.Console(file=terminal())
    console.print(table)
    if case.float8 is not None:
        console.print(_float8_line(rows))
    console.print(f"{'PASSED' if passed else 'FAILED'}: {len(rows)} tensors on {case.world_size} ranks")
    return passed


def _float8_line(rows: list[TensorError]) -> str:
    """The number of FP8 matmuls of a comparison, and of their codes and scales that differ."""
    codes, scales = (
        sum(int(row.error) for row in rows if kind(row.name).removeprefix(SINGLE) == group) for group in (CODES, SCALES)
    )
    lines = f"{count_recorded(row.name for row in rows)}; {codes} codes and {scales} scales differ"
    if any(row.name.startswith(IN_BF16) for row in rows):
        lines += (
            f"\n{SINGLE}: each layer by itself in bf16, fed with one process's tensors\n{IN_BF16}: the whole model in "
            "bf16; wide bounds, since a last place before a cast moves a code by an eighth"
        )
    return lines


def print_faults(case: Case, results: list[FaultResult], *, as_json: bool) -> bool:
    """Prints the self-test; returns whether every fault was found."""
    passed = all(result.seen for result in results)
    if as_json:
        faults = [{"fault": r.fault, "seen": r.seen, "worst": row_json(r.worst)} for r in results]
        print(json.dumps({"passed": passed, **_summary(case), "faults": faults}))
        return passed
    table = rich.table.Table("planted fault", "found", "by", "error", "bound", title=f"self-test, {_title(case)}")
    for fault, seen, row in results:
        table.add_row(fault, "yes" if seen else "NO", row.name, f"{row.error:.2e}", f"{row.bound:.0e}")
    console = rich.console.Console(file=terminal())
    console.print(table)
    console.print(f"{'PASSED: every' if passed else 'FAILED: not every'} planted fault was found")
    return passed


def row_json(row: TensorError) -> dict[str, Any]:
    """A tensor's error as a JSON object."""
    # JSON has no NaN or infinity.
    finite = row.error == row.error and row.error != float("inf")
    return {"name": row.name, "error": row.error if finite else None, "bound": row.bound, "passed": row.passed}


def summary(parallel: ParallelConfig, data_size: int) -> dict[str, Any]:
    """A mesh as a JSON object: the fields of `parallel`, and `dp`."""
    return parallel.model_dump() | {"dp": data_size}


def _summary(case: Case) -> dict[str, Any]:
    return summary(case.parallel, case.data_size) | {"dtype": case.dtype, "length": case.length}


def mesh_name(parallel: ParallelConfig, data_size: int) -> str:
    """Short name of a mesh: its axes of several ranks, each with its options that are not the default."""
    axes = []
    if parallel.tp > 1:
        axes.append(f"tp {parallel.tp}{' (sequence parallel)' if parallel.sequence_parallel else ''}")
    if parallel.cp > 1:
        axes.append(f"cp {parallel.cp}{'' if parallel.cp_exchange == 'auto' else f' ({parallel.cp_exchange})'}")
    if parallel.pp > 1:
        axes.append(f"pp {parallel.pp}{'' if parallel.pp_schedule == '1f1b' else f' ({parallel.pp_schedule})'}")
    if data_size > 1:
        shards = {"shard": parallel.shard, "zero": parallel.zero}
        options = ", ".join(f"{name} {value}" for name, value in shards.items() if value is not None)
        axes.append(f"dp {data_size}{options and f' ({options})'}")
    return " x ".join(axes) or "one rank"


def _title(case: Case) -> str:
    return f"{mesh_name(case.parallel, case.data_size)} against one process, {case.dtype}"
