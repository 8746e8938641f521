"""A rank's pipeline stages of a decoder, presented to the training loop as one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalin.data.batch import AnyBatch, Batch, map_fields
from megalin.errors import MegalinError, causes
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel, LossKind, ModelOutput
from megalin.model.pipeline_stages import DecoderStage, StagePlan
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.parallel.collectives import Axis
from megalin.parallel.cross_entropy import TokenScores
from megalin.parallel.mesh import Mesh
from megalin.parallel.pipeline_schedules import HiddenStatesShape, forward_through, make_schedule
from megalin.parallel.tensor_parallel import local


@contextmanager
def _errors_as_raised() -> Iterator[None]:
    """Re-raises a MegalinError that the pipeline engine wrapped in a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        for cause in causes(error):
            if isinstance(cause, MegalinError):
                raise cause from cause.__cause__
        raise


class Pipeline(nn.Module):
    """This rank's stages. Parameters have their global names, each once: if several of its stages hold copies, the
    first is the parameter and the others follow it.

    Attributes:
        plan: the sub-layers of each stage of the model.
    """

    loss_names = LanguageModel.loss_names

    def __init__(self, config: ModelConfig, plan: StagePlan, stages: Sequence[DecoderStage], mesh: Mesh) -> None:
        """Creates the groups of ranks that hold the same parameters, so it is a collective."""
        super().__init__()
        self.config, self.plan, self.pp, self._mesh = config, plan, mesh.pp, mesh
        self._stages = nn.ModuleList(stages)
        axes: dict[tuple[int, ...], Axis] = {}
        for holders in plan.holders.values():
            if tuple(holders) not in axes:
                axes[tuple(holders)] = self.pp.axis_of_holders(holders)
        self._holders = {name: axes[tuple(holders)] for name, holders in plan.holders.items()}
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._counts: Tensor | None = None
        self._loss_scale: Tensor | None = None

    def stages(self) -> list[DecoderStage]:
        """This rank's stages in order."""
        return cast(list[DecoderStage], list(self._stages))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages under their global names, each name once."""
        seen: set[str] = set()
        for stage in self.stages():
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def constants(self) -> dict[str, Tensor]:
        """The buffers of this rank's stages under their global names; where an earlier stage of this rank has the name,
        with the number of the stage."""
        found: dict[str, Tensor] = {}
        for number, stage in zip(self.pp.own_stages(), self.stages(), strict=True):
            for name, buffer in stage.named_buffers():
                found[f"{name} (stage {number})" if name in found else name] = buffer
        return found

    def _copies(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Yields each parameter held by several stages, with all its copies on this rank, in the order of the names."""
        of_stages = [dict(stage.named_parameters()) for stage in self.stages()]
        for name in self._holders:
            if copies := [parameters[name] for parameters in of_stages if name in parameters]:
                yield name, copies

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """The parameters of this rank whose first copy is on another rank, which counts them in the norm."""
        own = set(self.pp.own_stages())
        return [copies[0] for name, copies in self._copies() if self.plan.holders[name][0] not in own]

    def accumulate_gradients(
        self, batches: Sequence[AnyBatch], counts: Tensor, loss_scale: Tensor | None = None
    ) -> Tensor:
        """Forward and backward of a step's micro-batches, equal in shape, through all stages, in the schedule's order.

        Args:
            counts: [1] valid labels of the whole step; the loss is divided by them.
            loss_scale: [], multiplies the gradients but not the result.

        Returns:
            [1] fp64, the sum of this rank's losses: zero unless it has the last stage.
        """
        micro_batches = [cast(Batch, batch) for batch in batches]
        self._counts, self._loss_scale = counts.clamp(min=1), loss_scale
        inputs = map_fields(lambda *fields: torch.cat(fields), *micro_batches).inputs()
        tokens, losses = inputs.pop("tokens"), list[Tensor]()
        with _errors_as_raised():
            self._schedule(micro_batches).step(
                tokens, **inputs, target=inputs["labels"], losses=losses, return_outputs=False
            )
        for name, copies in self._copies():
            self.pp.sum_copies(copies, self._holders[name])
        missing = [name for name, parameter in self.named_parameters() if parameter.grad is None]
        assert not missing, f"the schedule gave no gradient to {missing}"
        total = torch.zeros(counts.shape, dtype=torch.float64, device=counts.device)
        for loss in losses:
            total += loss.detach()
        return total if loss_scale is None else total / loss_scale

    def _schedule(self, batches: Sequence[Batch]) -> Any:
        """The engine's schedule for this number and shape of micro-batches; created at first use."""
        tokens = batches[0].tokens
        key = (len(batches), *tokens.shape)
        if key not in self._schedules:
            self._schedules[key] = make_schedule(
                self._mesh.config.pp_schedule,
                self.pp,
                self.stages(),
                self._hidden_states_shape(tokens),
                tokens=tokens,
                num_micro_batches=len(batches),
                loss=self._loss,
                transfer=self._mesh.config.pp_transfer,
            )
        return self._schedules[key]

    def _loss(self, loss_sum: Tensor, _labels: Tensor) -> Tensor:
        """Contribution of a micro-batch to the step's mean loss; the last stage reads the labels itself."""
        assert self._counts is not None
        loss = (loss_sum / self._counts).sum()
        return loss if self._loss_scale is None else loss * self._loss_scale

    def _hidden_states_shape(self, tokens: Tensor) -> HiddenStatesShape:
        """Shape and dtype of the hidden states sent between stages for tokens [B, T/cp]."""
        stage, tp = self.stages()[0], self._mesh.tp
        length = tokens.shape[1] // tp.size if tp.sequence_parallel else tokens.shape[1]
        dtype = stage.compute_dtype
        if self.config.residual_dtype == "float32":
            dtype = compute_dtype(torch.empty(0, dtype=dtype))
        return HiddenStatesShape((tokens.shape[0], length, self.config.hidden_size), dtype)

    def outputs(self, inputs: Mapping[str, Tensor], *, losses: LossKind) -> Any:
        """The last stage's output of a batch, without a backward; None on ranks without that stage."""
        options: dict[str, Any] = {**inputs, "losses": losses}
        tokens = options.pop("tokens")
        return forward_through(self.pp, self.stages(), self._hidden_states_shape(tokens), tokens, options)

    def loss_sums(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Sum [1] of a batch's losses, without a backward; zero on ranks without the last stage."""
        sums: Tensor | None = self.outputs(inputs, losses="sum")
        return torch.zeros(1, device=self._mesh.device) if sums is None else sums

    def token_outputs(self, inputs: Mapping[str, Tensor]) -> ModelOutput | None:
        """Logits and token losses of a batch, without a backward; None on ranks without the last stage."""
        output: ModelOutput | None = self.outputs(inputs, losses="tokens")
        return output

    def token_scores(self, inputs: Mapping[str, Tensor]) -> TokenScores | None:
        """Scores of a batch's labels, without a backward; None on ranks without the last stage."""
        output: ModelOutput | None = self.outputs(inputs, losses="scores")
        return None if output is None else output.token_scores()

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Updates the copies of parameters and the values that mixers derive from weights; call it after a step and
        after loading weights."""
        for _, copies in self._copies():
            for copy in copies[1:]:
                local(copy).copy_(local(copies[0]))
        for stage in self.stages():
            stage.after_optimizer_step()

    def no_decay_names(self) -> set[str]:
        """Global names of this rank's parameters without weight decay."""
        return {name for stage in self.stages() for name in stage.no_decay_names()}

    def training_flops(self, length: int) -> int:
        """Forward and backward floating-point operations per token of the whole model."""
        return LanguageModel(self.config).training_flops(length)
