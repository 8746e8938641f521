"""Decoding by a state, as `megalin generate` decodes, against a forward of the same tokens in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.data.batch import Batch, batch_to
from megalin.generation.load import cast_weights
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.parallel.collectives import all_gather
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import TensorParallel, apply_to_shards
from megalin.verify.case import SAMPLES_PER_RANK, Case, make_batches
from megalin.verify.comparison import RELATIVE_BOUND, ROUNDING_FACTOR, TensorError, error

DECODING = "decoding"
"""Kind of the rows: the logits of the last token of a prompt and of the tokens after it."""
STEPS = 12
"""Most tokens that are decoded, more than the windows of shrunk models."""

Plant = Callable[[LanguageModel], None]
"""Plants a fault in a model that decodes."""


class _Sequences(NamedTuple):
    """Tokens of the first micro-batch: a prompt of several documents, of which decoding continues the last."""

    tokens: Tensor  # [B, P + N]
    document_ids: Tensor  # [B, P + N]
    prompt: int
    """P, beyond the middle, where context parallelism of two ranks starts a document."""
    continued: Tensor
    """[B, 1 + N] True for the prompt's last token and the later ones of its document."""


def compare_decoding(case: Case, mesh: Mesh, plant: Plant | None = None) -> list[TensorError]:
    """Compares the logits of a decoder that reads a prompt and then one token at a time with those of one process that
    reads all tokens at once; a collective of the first ranks of the tensor-parallel axis.

    Generation has no other axis but data parallelism over prompts, so those ranks decode. In bf16 and fp16, and in fp32
    where the bound is exceeded, the truth is a wider forward, and the bound twice the error of the narrow one.

    Returns:
        Rows decoding.mesh, with tensor parallelism, and decoding.one_process, on rank 0. No rows on other ranks, for
        encoders, which cannot decode, and for FP8, in which no model generates.
    """
    if not isinstance(case.model, ModelConfig) or case.float8 is not None:
        return []
    sequences, found = _sequences(case, mesh.device), dict[str, Tensor]()
    if mesh.tp.size > 1 and mesh.data.rank == mesh.pp.axis.rank == 0:
        tp = TensorParallel(mesh.tp.axis, device_mesh=mesh.tp.device_mesh)
        found[f"{DECODING}.mesh"] = _decode(_build(case, case.compute_dtype, mesh.device, tp), sequences, plant)
    if not mesh.is_first_rank:
        return []
    model = _build(case, case.compute_dtype, mesh.device)
    narrow = _forward(model, sequences)
    found[f"{DECODING}.one_process"] = _decode(model, sequences, plant)
    if not case.is_half:
        rows = _rows(case, found, narrow)
        if case.dtype != "float32" or all(row.passed for row in rows):
            return rows
    wide = torch.float32 if case.is_half else torch.float64
    truth = _forward(_build(case, wide, mesh.device), sequences)
    return _rows(case, found, truth, rounding=error(DECODING, narrow, truth, mesh.device))


def _rows(case: Case, found: dict[str, Tensor], truth: Tensor, *, rounding: float = 0.0) -> list[TensorError]:
    bound = max(RELATIVE_BOUND[case.dtype], ROUNDING_FACTOR * rounding)
    return [TensorError(name, error(name, logits, truth, truth.device), bound) for name, logits in found.items()]


def _sequences(case: Case, device: torch.device) -> _Sequences:
    batch = batch_to(make_batches(case)[0], device)
    assert isinstance(batch, Batch), type(batch)
    prompt = min(case.length // 2 + 3, case.length - 1)
    tokens, ids = (x[:SAMPLES_PER_RANK, : prompt + STEPS] for x in (batch.tokens, batch.document_ids))
    last = max(prompt - 1, 0)
    return _Sequences(tokens, ids, prompt, ids[:, last:] == ids[:, last, None])


def _build(case: Case, dtype: torch.dtype, device: torch.device, tp: TensorParallel | None = None) -> LanguageModel:
    """The model with its initial weights, sharded and cast as for generation."""
    assert isinstance(case.model, ModelConfig), type(case.model)
    model = LanguageModel(case.model, tp)
    if dtype == torch.float64:
        apply_to_shards(model, lambda x: x.double() if x.is_floating_point() else x)
    model.to_empty(device=device)
    init_weights(model, case.seed)
    if dtype != torch.float64:
        cast_weights(model, dtype)
    return model.eval()


@torch.no_grad()
def _forward(model: LanguageModel, sequences: _Sequences) -> Tensor:
    """Logits [B, 1 + N, V] of one forward of all tokens; zero where another document has begun."""
    logits = model(sequences.tokens, document_ids=sequences.document_ids).logits
    return _kept(model, logits[:, -sequences.continued.shape[1] :], sequences)


@torch.no_grad()
def _decode(model: LanguageModel, sequences: _Sequences, plant: Plant | None) -> Tensor:
    """The same logits by a forward of the prompt and steps from its state, in fixed memory."""
    if plant is not None:
        plant(model)
    tokens, ids, prompt, _ = sequences
    state, logits = model.initial_state(len(tokens), dtype=compute_dtype(model.embedding.weight)), []
    if prompt > 0:
        output = model(tokens[:, :prompt], document_ids=ids[:, :prompt], state=state)
        state, logits = output.state, [output.logits[:, -1:]]
    state, contexts = model.reserve(state, tokens.shape[1]), model.step_contexts(in_place=True)
    for token in tokens[:, prompt:].unbind(1):
        stepped = model.step(token, state, contexts)
        assert stepped.logits is not None
        assert stepped.state is not None
        logits, state = [*logits, stepped.logits], stepped.state
    return _kept(model, torch.cat(logits, dim=1), sequences)


def _kept(model: LanguageModel, logits: Tensor, sequences: _Sequences) -> Tensor:
    """Logits of all ranks [B, 1 + N, V], zero where another document has begun."""
    full = all_gather(logits, model.tp.axis, dim=-1)[..., : model.config.vocab_size]
    return full.where(sequences.continued[..., None], 0.0).clone()
