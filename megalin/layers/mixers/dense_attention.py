"""DANet's block body: attention without softmax, key, value or output matrices, and the FFN after it."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.layers.mixer_configs.dense_attention import DenseAttentionConfig
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, State, update_derived_buffers
from megalin.ops.attention.dense import (
    dense_attention,
    dense_attention_flops,
    dense_memory,
    local_dense_attention,
    read_memory,
    window_ids,
)
from megalin.ops.choices import RelPEForm
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.norms.max_norm import encoded_max_norm, max_norm
from megalin.ops.positions.encodings import document_spans, num_tokens_in_documents
from megalin.ops.positions.relpe import relpe, relpe_frequencies
from megalin.parallel.initialisation import Initializer
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.sequence_documents import DocumentView, SequenceDocuments


class DenseAttention(Mixer):
    """y = MaxNorm(r ReLU(Y W_up) W_down), head by head Y = Q X^T X with Q = X W_q, over all tokens of a document.

    X is the normed input, times N^(-1/3) for a document of N tokens without padding, times Cosine RelPE; X is zero at
    padding. `relpe` can encode Q and K = X alone, so that V = X has no positions. Local kinds attend to a window of the
    document, and N is the window's length: windows of `local` start with the document, those of `shifted_local`
    half a window before it. Positions count from 0 in each document, and in each window with `local_relpe`;
    context.positions is not read. A maxnorm of the input is fused with the two factors and applied here; the block
    applies any other norm.

    r = r_up r_down, r = min(1, w0 / max |W|) with w0 = (2 d_ff)^(-1/2), is updated after each step and constant in
    the backward. One factor serves both matrices, because ReLU commutes with a positive factor.

    Tensor parallelism: heads are sharded and Y is all-gathered; a single head is sharded along its width and Y is
    all-reduced. Context parallelism: X^T X is summed over the ranks; for a document or window that crosses shards,
    over the ranks that hold some of it. Source: DenseAttention (DANet) section 3 and appendix G, released code.
    """

    ratio: Tensor | None

    def __init__(self, config: DenseAttentionConfig, scope: BuildContext) -> None:
        super().__init__()
        width, heads, tp = scope.hidden_size, config.num_heads, scope.tp
        self.config, self.tp, self.cp, self.path = config, tp, scope.cp, scope.path
        self.head_dim, remainder = divmod(width, heads)
        if remainder:
            raise ConfigError(
                f"{scope.path}.num_heads = {heads} does not divide model.hidden_size = {width}; choose a divisor"
            )
        if heads > 1:
            tp.divide(heads, f"{scope.path}.num_heads")
        self._check_axes(scope)
        inner, name = config.ffn_ratio * width, f"{scope.path}.ffn_ratio * model.hidden_size"
        self.bound = (2 * inner) ** -0.5
        query_std = scope.init_std / math.sqrt(2 * scope.num_layers * width)
        self.query = ColumnParallelLinear(width, width, tp=tp, std=query_std, name="model.hidden_size")
        self.up = ColumnParallelLinear(width, inner, tp=tp, std=self.bound, name=name)
        self.down = RowParallelLinear(inner, width, tp=tp, std=self.bound, name=name)
        ratio = torch.empty((), device="meta") if config.scale_ffn_weights else None
        self.register_buffer("ratio", ratio, persistent=False)

    def _check_axes(self, scope: BuildContext) -> None:
        """Raises ConfigError for a form or an encoding that cannot be sharded so."""
        problems = []
        if self.config.form == "quadratic" and scope.cp.size > 1:
            problems.append(
                f'{scope.path}.form = "quadratic" needs all tokens, but parallel.cp = {scope.cp.size} shards them and '
                'sums X^T X; use form = "auto" or "linear", or parallel.cp = 1'
            )
        local_width = self.head_dim // (scope.tp.size if self.config.num_heads == 1 else 1)
        if self.config.relpe == "rope" and local_width % 2:
            problems.append(
                f'{scope.path}.relpe = "rope" rotates pairs, but a rank has {local_width} channels of a head; choose '
                "num_heads and parallel.tp so that it has an even number"
            )
        if problems:
            raise ConfigError("\n".join(problems))

    def init_weights(self, initializer: Initializer) -> None:
        """Computes `ratio` from the initial weights."""
        update_derived_buffers([self])

    def document_view(self, documents: SequenceDocuments) -> DocumentView:
        return DocumentView(documents.ids, documents.valid, full_sequence=documents.full_sequence)

    def norm_tracked_weights(self) -> list[nn.Parameter]:
        return [] if self.ratio is None else [self.up.weight, self.down.weight]

    def update_from_weights(self, largest: Tensor) -> None:
        if self.ratio is not None:
            self.ratio.copy_((self.bound / largest).clamp(max=1.0).prod())

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        if state is not None:
            self._refuse_state()
        x = self._scaled(self.tp.enter(x), context)  # [B, T, H, D/H]
        (hidden,) = self.up(self._attention(x, context))
        z = self.down(functional.relu(hidden))
        return MixerOutput(max_norm(z, eps=self.config.norm_eps, scale=self.ratio), ())

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        self._refuse_state()

    def _refuse_state(self) -> NoReturn:
        raise ConfigError(
            f"{self.path}: dense_attention attends to later tokens too, so no state can continue a "
            "sequence; give it full sequences, and generate with a decoder"
        )

    def _scaled(self, x: Tensor, context: MixerContext) -> Tensor:
        """[B, T, D] -> X [B, T, H, D/H], zero at padding."""
        config = self.config
        factor = self._num_visible(x, context).to(compute_dtype(x)) ** (-1.0 / 3.0)  # [1 or B, 1 or T]
        if context.documents.valid is not None:
            factor = factor * context.documents.valid
        if config.norms_input and config.relpe == "cosine" and config.relpe_frequencies == "released":
            positions, num_positions = self._positions(x, context)
            x = encoded_max_norm(
                x, factor, positions, num_positions=num_positions, num_heads=config.num_heads, eps=config.norm_eps
            )
            return x.unflatten(-1, (config.num_heads, self.head_dim))
        normed = max_norm(x, eps=config.norm_eps) if config.norms_input else x
        heads = (normed.to(factor.dtype) * factor[..., None]).unflatten(-1, (config.num_heads, self.head_dim))
        if config.relpe == "cosine":
            positions, _ = self._positions(x, context)
            heads = relpe(heads, self._theta(x.device), positions, form="cosine")
        return heads.to(x.dtype)

    def _positions(self, x: Tensor, context: MixerContext) -> tuple[Tensor, int]:
        """Positions [T] or [B, T] in the document or window, and a number that they are below."""
        config, documents = self.config, context.documents.full_sequence.document_ids
        positions, num_positions = self.cp.positions(x), x.shape[1] * self.cp.size
        if documents is not None:
            positions = positions - self.cp.shard(document_spans(documents).first)
        if config.window is not None and config.local_relpe:
            positions, num_positions = (positions + config.offset) % config.window, config.window
        return positions, num_positions

    def _theta(self, device: torch.device) -> Tensor:
        """Frequencies [D/H] of the encoding."""
        config = self.config
        return relpe_frequencies(config.relpe_frequencies, self.head_dim, constant=config.relpe_constant, device=device)

    def _encoded(self, q: Tensor, k: Tensor, context: MixerContext) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, H, K] with positions where these are encoded apart from the values."""
        forms: dict[str, tuple[RelPEForm, RelPEForm]] = {
            "cosine_qk": ("cosine", "cosine"),
            "g2": ("g2", "cosine"),
            "rope": ("rope", "rope"),
        }
        if self.config.relpe not in forms:
            return q, k
        theta, (positions, _) = self._theta(q.device), self._positions(q, context)
        if self.config.num_heads == 1:
            theta = self.tp.local_slice(theta, dim=-1)
        of_q, of_k = forms[self.config.relpe]
        return relpe(q, theta, positions, form=of_q), relpe(k, theta, positions, form=of_k)

    def _num_visible(self, x: Tensor, context: MixerContext) -> Tensor:
        """N of each token, at least 1: the window, or its document's tokens without padding; [1 or B, 1 or T]."""
        if self.config.window is not None:
            return torch.full((1, 1), self.config.window, device=x.device)
        sequence = context.documents.full_sequence
        if sequence.document_ids is not None:
            return self.cp.shard(num_tokens_in_documents(sequence.document_ids, sequence.valid)).clamp(min=1)
        if sequence.valid is not None:
            return sequence.valid.sum(1, keepdim=True).clamp(min=1)
        return torch.full((1, 1), x.shape[1] * self.cp.size, device=x.device)

    def _attention(self, x: Tensor, context: MixerContext) -> Tensor:
        """X [B, T, H, D/H] -> Y [B, T, D], on every rank of tp."""
        full = x.flatten(2)
        (q,) = self.query(full)
        own = self.tp.local_slice(full, dim=-1)  # [B, T, D/tp]
        if self.config.num_heads == 1:
            # Queries and keys are sharded along the width that is summed over; values are full.
            q, k, v = q[..., None, :], own[..., None, :], x
        else:
            q, k = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, own))
            v = k
        q, k = self._encoded(q, k, context)
        y = self._attend(q, k, v, context).flatten(2)
        return self.tp.all_reduce_both(y) if self.config.num_heads == 1 else self.tp.all_gather_last_dim(y)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: MixerContext) -> Tensor:
        """y_t = sum over the tokens s visible to t of (q_t . k_s) v_s, [B, T/cp, H, V]."""
        window, offset, documents = self.config.window, self.config.offset, context.documents.ids
        form = self.config.form
        if self.cp.size == 1:
            if window is None:
                return dense_attention(q, k, v, document_ids=documents, form=form)
            return local_dense_attention(q, k, v, window=window, offset=offset, document_ids=documents, form=form)
        if window is None and documents is None:
            return read_memory(q, self.cp.all_reduce_both(dense_memory(k, v))).to(v.dtype)
        runs = self._runs(q, context)
        own = self.cp.shard(runs)
        if window is None or documents is not None:
            y = dense_attention(q, k, v, document_ids=own, form=form)
        else:
            before = self.cp.tokens_before(q)
            y = local_dense_attention(q, k, v, window=window, offset=(before + offset) % window, form=form)
            if offset == 0 and q.shape[1] % window == 0:
                return y  # no window crosses shards
        first, last = own == own[:, :1], own == own[:, -1:]
        memories = dense_memory(k, v, kept=first), dense_memory(k, v, kept=last)
        around = self.cp.neighbouring_run_sums(*memories, self.cp.shard_documents_of(runs))
        for memory, readers in zip(around, (first, last), strict=True):
            y = y.to(memory.dtype) + read_memory(q, memory).where(readers[..., None, None], 0.0)
        return y.to(v.dtype)

    def _runs(self, q: Tensor, context: MixerContext) -> Tensor:
        """Ids of the windows or documents within which tokens attend to each other, of full sequences: [1 or B, T]."""
        documents = context.documents.full_sequence.document_ids
        if self.config.window is None:
            assert documents is not None
            return documents
        index = torch.arange(q.shape[1] * self.cp.size, device=q.device)
        return window_ids(index, window=self.config.window, offset=self.config.offset, document_ids=documents)

    def flops(self, length: int) -> int:
        visible = length if self.config.window is None else self.config.window
        config = self.config
        attention = dense_attention_flops(visible, num_heads=config.num_heads, head_dim=self.head_dim, form=config.form)
        return self.query.flops() + attention + self.up.flops() + self.down.flops()


MIXER = DenseAttention
