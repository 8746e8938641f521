"""Each FP8 layer of a model by itself in bf16, on the mesh against one process, fed with one process's tensors.

Nothing but the layer differs, so codes have the same bits there in bf16 too.
"""

from __future__ import annotations

from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalin.data.batch import batch_to
from megalin.ops.scaled_linear import scaled_matmul
from megalin.parallel.collectives import Axis, all_gather, local_slice
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.float8_layers import (
    Float8Settings,
    Linear,
    enable_float8,
    float8_linears,
    update_weight_magnitudes,
)
from megalin.parallel.float8_matmuls import Operands
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.mesh import Mesh
from megalin.parallel.messages import broadcast_bytes
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel, assign, full_tensor
from megalin.verify.case import SAMPLES_PER_RANK, Case, make_batches
from megalin.verify.comparison import ROUNDING_FACTOR, TensorError, error
from megalin.verify.float8 import full_operands
from megalin.verify.outcome import build_initialized, round_weights

SINGLE = "single_"
"""Prefix of the kinds of rows of single layers."""
_ONE = Axis("one")


class _Inputs(NamedTuple):
    """Inputs of a layer: x [B, T, K], the gradient dy [B, T, parts * N] of its output, all in bf16."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    """[parts, N, K] of a column-parallel layer, [N, K] of a row-parallel one."""


class _Results(NamedTuple):
    """Full tensors: y like dy, dx like x, dw like the weight; codes and scales by name."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    operands: dict[str, tuple[Tensor, Tensor]]
    recorded: Operands | None


def compare_layers(case: Case, mesh: Mesh) -> list[TensorError]:
    """Compares every FP8 layer of the case's model; a collective.

    Codes and scales must have the same bits; y, dx and dw of the mesh may err against fp64 products of the codes by
    twice what the same layer errs in bf16 on the same mesh, against fp64 products of its operands.

    Returns:
        Rows single_codes, single_scales, single_y, single_dx and single_dw of each layer; empty but on the first rank.
    """
    found = _record(case, mesh.device) if mesh.is_first_rank else None
    tensors = safetensors.torch.load(broadcast_bytes(None if found is None else safetensors.torch.save(found)))
    rows = []
    for name in sorted({key.rpartition(":")[0] for key in tensors}):
        inputs = _Inputs(*(tensors[f"{name}:{field}"].to(mesh.device) for field in _Inputs._fields))
        of_mesh, plain = (_on_mesh(inputs, mesh, case, float8=float8) for float8 in (True, False))
        if mesh.is_first_rank:
            rows += _compare(name, inputs, of_mesh, plain, _in_one_process(inputs))
    return rows


def _compare(name: str, inputs: _Inputs, of_mesh: _Results, plain: _Results, one: _Results) -> list[TensorError]:
    rows = []
    for operand, (codes, scales) in one.operands.items():
        for kind, index, expected in (("codes", 0, codes), ("scales", 1, scales)):
            differing = int((of_mesh.operands[operand][index] != expected).sum())
            rows.append(TensorError(f"{SINGLE}{kind}:{name}.{operand}", float(differing), 0.0))
    assert one.recorded is not None
    x, dy, weight = (t.double() for t in inputs)
    matrix = weight.flatten(0, -2)
    dw = (dy.flatten(0, 1).T @ x.flatten(0, 1)).view(weight.shape)
    exact = {"y": x @ matrix.T, "dx": dy @ matrix, "dw": dw}
    operands = one.recorded
    truth = {
        "y": scaled_matmul(operands.x, operands.weight, torch.float64).view(dy.shape),
        "dx": scaled_matmul(operands.dy, operands.transposed_weight, torch.float64).view(x.shape),
        "dw": dw,
    }
    for field in ("y", "dx", "dw"):
        bound = ROUNDING_FACTOR * error(field, getattr(plain, field), exact[field], x.device)
        found = error(field, getattr(of_mesh, field), truth[field], x.device)
        rows.append(TensorError(f"{SINGLE}{field}:{name}", found, bound))
    return rows


def _record(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Inputs of the FP8 layers in a forward and backward of the first micro-batch by one process in bf16."""
    model = build_initialized(case, torch.float32, device)
    round_weights(model, torch.bfloat16)
    tensors: dict[str, Tensor] = {}

    def watch(name: str, linear: Linear) -> RemovableHandle:
        def hook(_: object, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            tensors[f"{name}:x"] = inputs[0].detach().contiguous()
            tensors[f"{name}:weight"] = linear.weight.detach().contiguous()
            y.register_hook(lambda dy: tensors.update({f"{name}:dy": dy.contiguous()}))

        assert linear.float8 is not None
        linear.float8.record = lambda _: None  # each matmul alone
        return linear.float8.register_forward_hook(hook)

    for name, linear in float8_linears(model):
        watch(name, linear)
    model.loss_sums(batch_to(make_batches(case)[0], device).inputs()).sum().backward()
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}  # layers may share an input


def _layer(inputs: _Inputs, tp: TensorParallel, *, float8: bool) -> tuple[Linear, list[Operands]]:
    """A layer of this shape on the meta device, and the list that receives its operands."""
    *_, outputs, width = inputs.weight.shape
    layer: Linear
    if inputs.weight.dim() == 3:
        parts = len(inputs.weight)
        layer = ColumnParallelLinear(width, outputs, parts=parts, tp=tp, std=1.0, name="outputs")
    else:
        layer = RowParallelLinear(width, outputs, tp=tp, std=1.0, name="inputs")
    recorded: list[Operands] = []
    if float8:
        enable_float8(layer, [layer], Float8Settings(min_width=0))
        assert layer.float8 is not None
        layer.float8.record = recorded.append
    return layer, recorded


class _Single(nn.Module):
    """A layer as a model of its own, from the residual stream for a column-parallel one."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, ColumnParallelLinear):
            x = self.layer(x, gather_input=True, split_parts=False)
        else:
            x = self.layer(x)
        return x.clone()  # no view, of which FSDP warns


def _on_mesh(inputs: _Inputs, mesh: Mesh, case: Case, *, float8: bool) -> _Results:
    """Runs a layer on this rank's samples and tokens, sharded as training shards it; full results on every rank."""
    layer, recorded = _layer(inputs, mesh.tp, float8=float8)
    model = _Single(layer)
    shard_model(model, [], [], mesh, compute_dtype=torch.bfloat16)
    model.to_empty(device=mesh.device)
    assign(layer.weight, inputs.weight.float())
    update_weight_magnitudes(layer)
    column, tp = isinstance(layer, ColumnParallelLinear), mesh.tp
    tokens = tp.axis if tp.sequence_parallel else _ONE
    x, dy = (_own_tokens(t, mesh) for t in (inputs.x, inputs.dy))
    if column:
        x, dy = local_slice(x, tokens, dim=TOKENS), tp.local_slice(dy.unflatten(-1, (len(inputs.weight), -1)), dim=3)
        dy = dy.flatten(2)
    else:
        x, dy = tp.local_slice(x, dim=2), local_slice(dy, tokens, dim=TOKENS)
    x = x.contiguous().requires_grad_()
    y = model(x)
    y.backward(dy.contiguous())
    assert x.grad is not None
    assert layer.weight.grad is not None
    y, dx = y.detach(), x.grad
    if column:
        y = all_gather(y.unflatten(-1, (len(inputs.weight), -1)), tp.axis, dim=3).flatten(2)
        dx = all_gather(dx, tokens, dim=TOKENS)
    else:
        y, dx = all_gather(y, tokens, dim=TOKENS), all_gather(dx, tp.axis, dim=2)
    y, dx = (all_gather(all_gather(t, mesh.cp.axis, dim=TOKENS), mesh.samples, dim=0).clone() for t in (y, dx))
    operands = _by_name(layer, recorded, SAMPLES_PER_RANK, mesh)
    return _Results(y, dx, full_tensor(layer.weight.grad).clone(), operands, None)


def _own_tokens(tensor: Tensor, mesh: Mesh) -> Tensor:
    return local_slice(local_slice(tensor, mesh.samples, dim=0), mesh.cp.axis, dim=TOKENS)


def _in_one_process(inputs: _Inputs) -> _Results:
    layer, recorded = _layer(inputs, TensorParallel(), float8=True)
    layer.to_empty(device=inputs.x.device)
    assign(layer.weight, inputs.weight.float())
    update_weight_magnitudes(layer)
    layer.weight.data = layer.weight.data.bfloat16()
    x = inputs.x.clone().requires_grad_()
    y = _Single(layer)(x)
    y.backward(inputs.dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    operands = _by_name(layer, recorded, len(inputs.x), None)
    return _Results(y.detach(), x.grad, layer.weight.grad, operands, recorded[0])


def _by_name(
    layer: Linear, recorded: list[Operands], num_samples: int, mesh: Mesh | None
) -> dict[str, tuple[Tensor, Tensor]]:
    if not recorded:
        return {}
    (operands,) = recorded
    return {name: (codes, scales) for name, codes, scales in full_operands(layer, operands, num_samples, mesh)}
