"""Pipeline stages of a decoder: the partition of its sub-layers by cost, and a stage as a module."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.errors import ConfigError
from megalin.model.base import Stage
from megalin.model.config import AnyModelConfig, EncoderConfig, ModelConfig
from megalin.model.language_model import LanguageModel, LossKind, ModelOutput
from megalin.model.pipeline_partition import cut_evenly, cut_for_interleaving
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.pipeline_parallel import LOSS_DTYPE
from megalin.parallel.tensor_parallel import TensorParallel

_EMBEDDING_COST = 0.15
"""Time of the embedding, most of it for its table's gradient, over that of the head. Measured on H200 with 64,000 rows
and 8,192 tokens a micro-batch (docs/benchmarks/2026-11-22-h200-pipeline.md)."""


class StagePlan(NamedTuple):
    """Partition of a decoder's sub-layers into pipeline stages."""

    sublayers: list[range]
    """Sub-layers of each stage, by their numbers in the model."""
    places: list[tuple[int, int]]
    """(layer, index in the layer) of each sub-layer of the model."""
    costs: list[int]
    """Forward operations a token of each stage, with input layers and head; the embedding as a fraction of the head."""
    holders: dict[str, list[int]]
    """Stages that hold a parameter, by global name, of those that several stages hold."""

    def report_lines(self) -> list[str]:
        """A line a stage for the log. Layer 4.1 is the second sub-layer of layer 4, where a stage has some of them."""
        total = sum(self.costs)
        extras = [" and the embedding", *[""] * (len(self.sublayers) - 2), " and the head"]
        return [
            f"stage {number}: layers {self._span(part)}{extra}, {cost / total:.1%} of the work"
            for number, (part, cost, extra) in enumerate(zip(self.sublayers, self.costs, extras, strict=True))
        ]

    def _span(self, part: range) -> str:
        (first, begin), (last, end) = self.places[part.start], self.places[part.stop - 1]
        cut = part.stop < len(self.places) and self.places[part.stop][0] == last
        return f"{first}{f'.{begin}' if begin else ''} to {last}{f'.{end}' if cut else ''}"


class DecoderStage(LanguageModel):
    """The blocks of one stage of a decoder, with the embedding on the first and norm and head on the last.

    Args:
        compute_dtype: dtype in which the blocks compute; later stages have no embedding to derive it from.
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
        max_label_fraction: float = 1.0,
    ) -> None:
        super().__init__(config, tp, cp=cp, recompute=recompute, stage=stage, max_label_fraction=max_label_fraction)
        self.compute_dtype = compute_dtype

    # torch.distributed.pipelining calls a stage with the previous stage's output.
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        document_ids: Tensor,
        labels: Tensor,
        losses: LossKind = "sum",
        draw: Tensor | None = None,
    ) -> Tensor | ModelOutput:
        """Runs T tokens of each of B sequences through this stage.

        Args:
            x: [B, T] ids on the first stage, else the residual stream [B, T or T/tp, D].
            document_ids: [B, T], non-decreasing along T.
            labels: [B, T] next ids, IGNORED_LABEL where there is no loss; the last stage reads them.
            losses: sum: the last stage returns the sum of the losses, [1] fp64; tokens: logits and a loss a token;
                scores: scores of the labels.
            draw: [B] the numbers of the samples in the run, which key dropout masks; read in training alone.

        Returns:
            The residual stream; on the last stage the sum, or the output.
        """
        positions = self.cp.positions(document_ids)
        if self.stage.is_first:
            x = self.embedding.embed(x) * self.config.embedding_scale
        context = self.context(document_ids, positions, document_ids, self.compute_dtype)
        context = context._replace(dropout=self.dropout_keys(draw, document_ids))
        if self.stage.is_first:
            x, _ = self.apply_input_layers(x, context, None)
        for block in self.block_list():
            x, _ = block(x, block.contexts(context), None)
        if not self.stage.is_last:
            return x
        output = self.head_output(self.norm(x).to(context.compute_dtype), labels, losses)
        # The schedule expects this dtype, whatever kernel ran; a copy, because the schedule detaches it in place.
        return output.loss_sums().to(LOSS_DTYPE, copy=True) if losses == "sum" else output


def plan_stages(config: AnyModelConfig, num_stages: int, *, num_ranks: int, length: int) -> StagePlan:
    """Partitions the sub-layers into contiguous pipeline stages, stage s on rank s % num_ranks.

    One stage a rank balances cost; several stages a rank minimize the simulated time of the interleaved schedule. A
    sub-layer costs its mixer's operations, the head its matmul, the embedding a fraction of that. Stages pass on the
    residual stream, so none ends after a sub-layer whose result only the next one reads (`residual = "two_hop"`).

    Raises:
        ConfigError: an encoder, or more stages than the model has places to cut.
    """
    if isinstance(config, EncoderConfig):
        raise ConfigError(
            'model.kind = "encoder": an encoder cannot be partitioned into stages (its heads need the embedding and '
            "the pooled first token); use parallel.pp = 1 and more tp, cp or data parallelism"
        )
    whole = LanguageModel(config)
    sublayers, costs = cut_stages(whole, num_stages, num_ranks=num_ranks, length=length), _costs(whole, length)
    holders: dict[str, list[int]] = {}
    for number, part in enumerate(sublayers):
        stage = Stage(number, num_stages, part)
        for name, _ in LanguageModel(config, stage=stage).named_parameters():
            holders.setdefault(name, []).append(number)
    shared = {name: stages for name, stages in sorted(holders.items()) if len(stages) > 1}
    return StagePlan(sublayers, _places(config), [sum(costs[part.start : part.stop]) for part in sublayers], shared)


def cut_stages(whole: LanguageModel, num_stages: int, *, num_ranks: int, length: int) -> list[range]:
    """The sub-layers of each stage of `plan_stages`. Raises ConfigError for more stages than places to cut."""
    blocks = [block.sublayers for _, block in whole.config.blocks()]
    places = _places(whole.config)
    ends = [end for end, (layer, index) in enumerate(places, 1) if blocks[layer][index].residual != "two_hop"]
    if num_stages > len(ends):
        raise ConfigError(_too_many_stages(num_ranks, num_stages // num_ranks, len(ends)))
    costs = _costs(whole, length)
    runs = [range(start, end) for start, end in itertools.pairwise([0, *ends])]
    run_costs = [sum(costs[run.start : run.stop]) for run in runs]
    if num_stages == num_ranks:
        cut = cut_evenly(run_costs, num_stages)
    else:
        cut = cut_for_interleaving(run_costs, num_stages, num_ranks=num_ranks)
    return [range(runs[part.start].start, runs[part.stop - 1].stop) for part in cut]


def _places(config: ModelConfig) -> list[tuple[int, int]]:
    """Block and index in it of each sub-layer."""
    return [(layer, index) for layer, (_, block) in enumerate(config.blocks()) for index in range(len(block.sublayers))]


def _costs(whole: LanguageModel, length: int) -> list[int]:
    """Cost of each sub-layer, with embedding and head in those of the first and the last."""
    costs = [mixer.flops(length) for mixer in whole.mixers()]
    head = whole.forward_flops(length) - whole.stack_flops(length)
    costs[0] += round(_EMBEDDING_COST * head) + sum(mixer.flops(length) for mixer in whole.input_mixers())
    costs[-1] += head
    return costs


def _too_many_stages(num_ranks: int, stages_a_rank: int, most: int) -> str:
    """The error for too many stages: the rule, and for each key the values that fit the other."""
    asked, remedies = f"parallel.pp = {num_ranks} stages", []
    if stages_a_rank > 1:
        asked = f"parallel.pp = {num_ranks} times parallel.pp_stages_per_rank = {stages_a_rank} stages"
    if (ranks := most // stages_a_rank) > 1:
        remedies.append(f"parallel.pp = {ranks} or less")
    if (stages := most // num_ranks) > 1:
        remedies.append(f"parallel.pp_stages_per_rank = {stages}" + (" or less" if stages > 2 else ""))
    elif stages == 1:
        remedies.append('parallel.pp_stages_per_rank = 1 with another pp_schedule than "interleaved"')
    return (
        f"{asked} are more than the {most} into which the model's sub-layers can be partitioned; use "
        f"{', or '.join(remedies) or 'parallel.pp = 1'}"
    )
