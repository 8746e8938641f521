"""Codes and scales of FP8 matmuls in a comparison: recorded on every rank, gathered to those of the full operands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalin.parallel.collectives import Axis, all_gather
from megalin.parallel.float8_layers import Linear, float8_linears
from megalin.parallel.float8_matmuls import Operands
from megalin.parallel.linear import ColumnParallelLinear
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.float8 import planned_layers
from megalin.train.pipeline_model import Pipeline
from megalin.verify.case import Case

CODES, SCALES, MAGNITUDES = "codes", "scales", "magnitudes"
"""Kinds of an outcome's tensors: e4m3 bits and fp32 scales, codes:<layer>.<operand>.<micro-batch>, and magnitudes of
weights after the step, magnitudes:<layer>.<weight or transposed_weight>."""
ONE_RANK = Axis("one")
NEGATIVE_ZERO = 0x80
"""Recorded as 0: the sign of a gradient of zero, such as that of a query before any key, is rounding."""


class OperandRecorder:
    """Records the quantised operands of every FP8 layer of a model, or of this rank's stages, in each backward."""

    def __init__(self, model: TrainedModel) -> None:
        self._layers = _layers(model)
        self._found: dict[str, list[Operands]] = {name: [] for name, _ in self._layers}
        for name, linear in self._layers:
            assert linear.float8 is not None
            linear.float8.record = self._found[name].append

    def tensors(self, num_samples: int, mesh: Mesh | None = None) -> dict[str, Tensor]:
        """The codes and scales of the full operands, on the host, by the names of an outcome; a collective.

        Args:
            num_samples: of this rank's micro-batch.
            mesh: None: this process computes all.
        """
        found = {}
        for name, linear in self._layers:
            for index, operands in enumerate(self._found[name]):
                for operand, codes, scales in full_operands(linear, operands, num_samples, mesh):
                    found[f"{CODES}:{name}.{operand}.{index}"] = codes.clone().cpu()
                    found[f"{SCALES}:{name}.{operand}.{index}"] = scales.clone().cpu()
        return found


def weight_magnitudes(model: TrainedModel, mesh: Mesh | None = None) -> dict[str, Tensor]:
    """The magnitudes of the rows of full weights and of their transposes, [parts, N] and [K], by the names of an
    outcome; a collective."""
    found = {}
    tp = ONE_RANK if mesh is None else mesh.tp.axis
    for name, linear in _layers(model):
        assert linear.float8 is not None
        outputs, inputs = linear.float8.out_magnitudes, linear.float8.in_magnitudes
        if isinstance(linear, ColumnParallelLinear):
            outputs = all_gather(outputs.unflatten(0, (linear.parts, -1)), tp, dim=1)
        else:
            outputs, inputs = outputs[None], all_gather(inputs, tp, dim=0)
        found[f"{MAGNITUDES}:{name}.weight"] = outputs.clone().cpu()
        found[f"{MAGNITUDES}:{name}.transposed_weight"] = inputs.clone().cpu()
    return found


def _layers(model: TrainedModel) -> list[tuple[str, Linear]]:
    stages: Sequence[nn.Module] = model.stages() if isinstance(model, Pipeline) else [model]
    return [layer for stage in stages for layer in float8_linears(stage)]


def full_operands(
    linear: Linear, operands: Operands, num_samples: int, mesh: Mesh | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each operand's name, its full codes and the scales of its full rows.

    x [B, T, K], dy [B, T, parts, N], weight [parts, N, K], transposed_weight [K, parts, N]; scales without the
    dimensions of a row.
    """
    column = isinstance(linear, ColumnParallelLinear)
    parts = linear.parts if isinstance(linear, ColumnParallelLinear) else 1
    tp, cp, samples = (ONE_RANK,) * 3 if mesh is None else (mesh.tp.axis, mesh.cp.axis, mesh.samples)
    for name, (codes, scales) in operands._asdict().items():
        bits = codes.view(torch.uint8)
        bits = torch.where(bits == NEGATIVE_ZERO, 0, bits)
        if name in ("x", "dy"):
            bits, scales = (t.unflatten(0, (num_samples, -1)) for t in (bits, scales))
            if name == "dy":
                bits = bits.unflatten(-1, (parts, -1))
            if column == (name == "dy"):
                bits = all_gather(bits, tp, dim=bits.dim() - 1)
            for axis, dim in ((cp, 1), (samples, 0)):
                bits, scales = all_gather(bits, axis, dim=dim), all_gather(scales, axis, dim=dim)
        elif name == "weight":
            bits, scales = (t.unflatten(0, (parts, -1)) for t in (bits, scales))
            bits = all_gather(bits, tp, dim=1 if column else 2)
            scales = all_gather(scales, tp, dim=1) if column else scales
        else:
            bits = bits.unflatten(-1, (parts, -1))
            bits = all_gather(bits, tp, dim=2 if column else 0)
            scales = scales if column else all_gather(scales, tp, dim=0)
        yield name, bits, scales


class Count(NamedTuple):
    """FP8 layers and matmuls of a step."""

    layers: int
    matmuls: int

    def __str__(self) -> str:
        return f"{self.matmuls} matmuls of {self.layers} linear layers in FP8"


def count_recorded(names: Iterable[str]) -> Count:
    """The layers and matmuls whose operands are among an outcome's tensors."""
    recorded = re.compile(rf"{CODES}:(.*)\.(x|dy)\.\d+")
    layers = [match[1] for name in names if (match := recorded.fullmatch(name))]
    return Count(len(set(layers)), len(layers))


def count_planned(case: Case) -> Count:
    """The layers and matmuls of the case's model that run in FP8, forward and data gradient. Raises ConfigError as
    `find_layers`."""
    assert case.float8 is not None, case.dtype
    layers = len(planned_layers(case.model, case.parallel, case.float8).float8)
    return Count(layers, 2 * layers * case.num_micro_batches)
