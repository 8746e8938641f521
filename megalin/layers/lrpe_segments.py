"""Sequences cut into segments from whose middle LRPE counts positions, and the states between them.

See `ops.positions.lrpe_states`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.choices import LRPEForm
from megalin.ops.positions.lrpe_states import enter_segments, move_origin
from megalin.ops.scans.states import decay_state


class LRPESegments(NamedTuple):
    """N segments of L tokens a sequence; the last one is shorter where L does not divide the length."""

    rows: int
    """B."""
    length: int
    """T, tokens a sequence."""
    tokens: int
    """L."""
    theta: Tensor
    """[H, K/2] angular frequencies in radians a token."""
    form: LRPEForm
    slopes: Tensor
    """[H]."""
    document_ids: Tensor | None
    """[B, T]; None where each sequence is one document."""

    @property
    def number(self) -> int:
        """N."""
        return -(-self.length // self.tokens)

    def positions(self, device: torch.device) -> Tensor:
        """[T], from -L/2 in each segment."""
        return torch.arange(self.length, device=device) % self.tokens - self.tokens // 2

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B N, L, ...], with zeros after the last token."""
        missing = -self.length % self.tokens
        if missing:
            x = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
        return x.reshape(self.rows * self.number, self.tokens, *x.shape[2:])

    def join(self, x: Tensor) -> Tensor:
        """[B N, L, ...] -> [B, T, ...]."""
        return x.unflatten(0, (self.rows, self.number)).flatten(1, 2)[:, : self.length]

    def cut_documents(self) -> Tensor | None:
        """The documents of the segments, [B N, L]."""
        return None if self.document_ids is None else self.cut(self.document_ids)

    def added(self, k: Tensor, v: Tensor) -> Tensor:
        """The state that each segment adds, [B, N, H, K, V], from k, v [B N, L, H, K or V] of `cut`."""
        added = decay_state(k, v, self.slopes, document_ids=self.cut_documents())
        return added.unflatten(0, (self.rows, self.number))

    def entering(self, added: Tensor, initial: Tensor | None = None) -> Tensor:
        """The state [B, N, H, K, V] before each segment; before the first it is `initial` [B, H, K, V] or zero."""
        ids = self.cut_documents()
        ids = None if ids is None else ids.unflatten(0, (self.rows, self.number)).flatten(1)
        return enter_segments(
            added, self.theta, self.slopes, form=self.form, length=self.tokens, initial=initial, document_ids=ids
        ).entering

    def leaving(self, k: Tensor, v: Tensor, entering: Tensor) -> Tensor:
        """The state after the last token, [B, H, K, V], in positions counted from the sequence's length after the first
        segment's origin; k, v [B, T, H, K or V], entering [B, N, H, K, V]."""
        length = (self.length - 1) % self.tokens + 1
        ids = None if self.document_ids is None else self.document_ids[:, -length:]
        added = decay_state(k[:, -length:], v[:, -length:], self.slopes, document_ids=ids)
        return enter_segments(
            added[:, None],
            self.theta,
            self.slopes,
            form=self.form,
            length=length,
            initial=entering[:, -1],
            document_ids=ids,
        ).leaving

    def moved(self, state: Tensor, tokens: int) -> Tensor:
        """The state [B, H, K, V] in positions counted from an origin `tokens` later."""
        return move_origin(state, self.theta, tokens, form=self.form)
