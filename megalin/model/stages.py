"""A decoder cut into the stages of a pipeline: which layers each gets, by cost, and a stage as a module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalin.errors import ConfigError
from megalin.layers.mixers.base import Mixer
from megalin.model.config import AnyModelConfig, EncoderConfig, ModelConfig
from megalin.model.language_model import LanguageModel, ModelOutput
from megalin.model.stack import Stage
from megalin.parallel.context import ContextParallel
from megalin.parallel.pipeline import LOSS_DTYPE
from megalin.parallel.tensor_parallel import TensorParallel


class StagePlan(NamedTuple):
    """How a decoder's layers are shared out."""

    layers: list[range]
    """The blocks of each stage."""
    costs: list[int]
    """Forward floating-point operations a token of each stage, embedding, input layers and head counted."""
    holders: dict[str, list[int]]
    """By global name, the stages of each parameter that several stages hold."""

    def lines(self) -> list[str]:
        """A line a stage, for people."""
        total = sum(self.costs)
        extras = [" and the embedding", *[""] * (len(self.layers) - 2), " and the head"]
        return [
            f"stage {number}: layers {layers.start} to {layers.stop - 1}{extra}, {cost / total:.1%} of the work"
            for number, (layers, cost, extra) in enumerate(zip(self.layers, self.costs, extras, strict=True))
        ]


class DecoderStage(LanguageModel):
    """The blocks of one stage of a decoder, with the embedding on the first and norm and head on the last.

    Args:
        compute_dtype: what the blocks compute in; later stages see no embedding that tells it.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel | None,
        *,
        cp: ContextParallel | None,
        recompute: bool,
        stage: Stage,
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__(config, tp, cp=cp, recompute=recompute, stage=stage)
        self.compute_dtype = compute_dtype

    # The engine calls a stage with what the stage before it gave.
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        document_ids: Tensor,
        labels: Tensor,
        losses: Literal["tokens", "sum"] = "sum",
    ) -> Tensor | ModelOutput:
        """Runs T tokens of each of B sequences through this stage.

        Args:
            x: [B, T] ids on the first stage, else the residual stream [B, T or T/tp, D].
            document_ids: [B, T], non-decreasing along T.
            labels: [B, T] next ids, IGNORED_LABEL where there is no loss; the last stage reads them.
            losses: sum: the last stage returns the sum of the losses, [1] fp64; tokens: logits and a loss a token.

        Returns:
            The residual stream; on the last stage the sum, or the output with the logits.
        """
        positions = self.cp.positions(document_ids)
        if self.stage.is_first:
            x = self.embedding.embed(x) * self.config.embedding_scale
        context = self.context(document_ids, positions, document_ids, self.compute_dtype)
        if self.stage.is_first:
            x, _ = self.apply_input_layers(x, context, None)
        for block in self.block_list():
            x, _ = block(x, block.contexts(context), None)
        if not self.stage.is_last:
            return x
        output = self.head_output(self.norm(x).to(context.compute_dtype), labels, losses)
        # Told to the engine beforehand, so of one dtype whatever kernel gave it; not a view: the engine detaches it.
        return output.loss_sums().to(LOSS_DTYPE, copy=True) if losses == "sum" else output


def plan_stages(config: AnyModelConfig, num_stages: int, *, length: int) -> StagePlan:
    """The cut into runs of neighbouring blocks whose largest cost is least, of those the most even.

    A block costs its mixers' operations, the head its product with the table, the embedding a multiply and an add an
    element.

    Raises:
        ConfigError: an encoder, or more stages than blocks.
    """
    if isinstance(config, EncoderConfig):
        raise ConfigError(
            'model.kind = "encoder": an encoder cannot be cut into stages (its heads need the embedding and the pooled '
            "first token); use parallel.pp = 1 and more tp, cp or data parallelism"
        )
    if num_stages > config.num_layers:
        raise ConfigError(
            f"parallel.pp times parallel.pp_stages = {num_stages} stages, but the model has {config.num_layers} layers "
            f"and each stage needs one; use at most {config.num_layers} stages"
        )
    whole = LanguageModel(config)
    costs = [_flops(block.mixers(), length) for block in whole.block_list()]
    costs[0] += 2 * config.hidden_size + _flops(whole.input_mixers(), length)
    costs[-1] += whole.forward_flops(length) - whole.stack_flops(length)
    layers = _even_cut(costs, num_stages)
    holders: dict[str, list[int]] = {}
    for number, part in enumerate(layers):
        stage = Stage(number, num_stages, part)
        for name, _ in LanguageModel(config, stage=stage).named_parameters():
            holders.setdefault(name, []).append(number)
    shared = {name: stages for name, stages in sorted(holders.items()) if len(stages) > 1}
    return StagePlan(layers, [sum(costs[part.start : part.stop]) for part in layers], shared)


def _flops(mixers: Sequence[Mixer], length: int) -> int:
    return sum(mixer.flops(length) for mixer in mixers)


def _even_cut(costs: list[int], num_parts: int) -> list[range]:
    """Runs of neighbours with the least largest sum, of those with the least sum of squares: by the length of what is
    cut so far, for one part more at a time."""
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [0])}  # by end: (largest, squares), borders
    for part in range(num_parts):
        ends = range(part + 1, len(costs) - (num_parts - part - 1) + 1)
        best = {
            end: min(
                (
                    (max(largest, before[end] - before[start]), squares + (before[end] - before[start]) ** 2),
                    [*borders, end],
                )
                for start, ((largest, squares), borders) in best.items()
                if start < end
            )
            for end in ends
        }
    borders = best[len(costs)][1]
    return [range(start, end) for start, end in itertools.pairwise(borders)]
