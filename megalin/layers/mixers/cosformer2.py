"""cosFormer2: linear attention without decay, with learnable cosine LRPE, a low-rank gate, and TPE as input layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megalin.layers.gates import MixerGates
from megalin.layers.linear_attention import LowRankGatedAttention
from megalin.layers.mixer_configs.cosformer2 import CosFormer2Config
from megalin.layers.mixers.base import BuildContext, FullPrecision, Mixer, MixerContext, MixerOutput, State
from megalin.ops.dispatch.overrides import bypasses
from megalin.ops.scans.driver import fold
from megalin.ops.scans.states import tpe_state
from megalin.ops.scans.tpe import TPEOutput, tpe, tpe_flops, tpe_step
from megalin.ops.scans.transition import DiagonalDecay
from megalin.parallel.initialisation import Initializer, constant
from megalin.parallel.tensor_parallel import TensorParallel, local

LARGEST_LOGIT = 4.0
"""TPE's initial decays are evenly spaced in logits from -4 to 4: lambda 0.018 to 0.982, memories of 1 to 55 tokens."""


class CosFormer2(LowRankGatedAttention):
    """y = (norm(scan(LRPE(silu(q)), LRPE(silu(k)), v)) * G) W_o without decay, G = sigmoid(x W_down W_up).

    The gate has rank D / H. Source: the scaling-laws paper eq. 17, with p theta for its theta.
    """

    def __init__(self, config: CosFormer2Config, scope: BuildContext) -> None:
        super().__init__(config, scope, decay=None)

    @classmethod
    def input_layer(cls, config: CosFormer2Config, scope: BuildContext) -> TPE:
        """TPE of the model's embedded tokens."""
        return TPE(config, scope)


class TPEParameters(FullPrecision):
    """B [D, E], channels sharded over the axis, and the logits of lambda [E], shared by all channels."""

    def __init__(self, hidden_size: int, num_decays: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.coefficients = tp.parameter(hidden_size, num_decays, shard_dim=0)
        self.decay_logit = tp.parameter(num_decays, shard_dim=None)

    def init_weights(self, initializer: Initializer) -> None:
        """B sums to one over the decays of each channel; the decays cover all time scales (LARGEST_LOGIT)."""
        num_decays = self.decay_logit.numel()
        initializer(self.coefficients, "coefficients", constant(1.0 / num_decays))
        initializer(
            self.decay_logit, "decay_logit", constant(torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, num_decays))
        )

    def forward(self) -> tuple[Tensor, ...]:
        """B [D/tp, E], and the logits."""
        return local(self.coefficients).clone(), local(self.decay_logit).clone()


class TPE(Mixer):
    """y_t = sum over s <= t of x_s sum_k B_k lambda_k^(t - s) in each channel; log lambda = logsigmoid(logit).

    There are as many decays as channels in a head. Channels are sharded over the axis.
    """

    def __init__(self, config: CosFormer2Config, scope: BuildContext) -> None:
        super().__init__()
        self.tp, self.cp, self.width, self.chunk_size = scope.tp, scope.cp, scope.hidden_size, config.chunk_size
        self.num_decays = self.width // config.num_heads
        self.local_width = scope.tp.divide(self.width, "model.hidden_size")
        self.full_precision = TPEParameters(self.width, self.num_decays, tp=scope.tp)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        mine, coefficients, log_decay = self._local(x, context)
        memory = state[0] if state else self._entering(mine, coefficients, log_decay, context)
        result = tpe(
            mine,
            coefficients,
            log_decay,
            state=memory,
            document_ids=context.documents.ids,
            chunk_size=self.chunk_size,
        )
        return self._whole(result, keep_state=state is not None)

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        mine, coefficients, log_decay = self._local(x, context)
        output, memory = tpe_step(mine[:, 0], coefficients, log_decay, state[0])
        return self._whole(TPEOutput(output[:, None], memory), keep_state=True)

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """log lambda [1, E] of all channels."""
        return MixerGates(functional.logsigmoid(context.full_precision[1])[None])

    def _local(self, x: Tensor, context: MixerContext) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's channels [B, T, D/tp], their B [D/tp, E], and log lambda [E]."""
        coefficients, logit = context.full_precision
        # Every rank uses all decays, on its own channels only.
        log_decay = functional.logsigmoid(self.tp.all_reduce_gradient(logit))
        return self.tp.local_slice(self.tp.enter(x), dim=-1), coefficients, log_decay

    def _entering(self, x: Tensor, coefficients: Tensor, log_decay: Tensor, context: MixerContext) -> Tensor | None:
        """The state [B, D/tp, E] after the previous ranks' tokens; None where this rank has the full sequence."""
        shard = self.cp.sequence_shard(context.documents.shard)
        if shard is None:
            return None
        added = tpe_state(x, coefficients, log_decay, document_ids=context.documents.ids)
        total = x.shape[1] * log_decay[None]  # [1, E], of one head whose keys are the decays
        return fold(added.mT[:, None], DiagonalDecay(total), shard)[:, 0].mT

    def _whole(self, result: TPEOutput, *, keep_state: bool) -> MixerOutput:
        """All channels, in the layout of the residual stream: each rank pads its own with zeros, and `leave` sums."""
        before = self.tp.axis.rank * self.local_width
        y = functional.pad(result.output, (before, self.width - before - self.local_width))
        return MixerOutput(self.tp.leave(y), (result.state,) if keep_state else ())

    def flops(self, length: int) -> int:
        return tpe_flops(hidden_size=self.width, num_decays=self.num_decays)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.local_width, self.num_decays)]


MIXER = CosFormer2
