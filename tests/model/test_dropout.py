"""Dropout of a model: its places against a plain forward with masks by numpy, the same masks on every mesh, and none
outside of training. tests/verify/test_three_axes.py compares more meshes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalin.layers.mixers.base import SequenceContext
from megalin.model.encoder import Encoder
from megalin.model.language_model import LanguageModel
from megalin.parallel.sequence_documents import SequenceDocuments
from tests import encoder_cases
from tests.cases import CASES, GLU, HYBRID, LENGTH, NAMES, Case, attention, build, make_inputs, model
from tests.numerics import assert_close
from tests.verify.test_context_parallel import Named, assert_agrees, compared, named

SEED, DRAW = 2**32 + 11, 2**33 - 2 + torch.arange(4)
RATES = {"embedding_dropout": 0.25, "hidden_dropout": 0.1}


def dropped(case: Any) -> Any:
    """The case with dropout."""
    return case._replace(name=f"{case.name} with dropout", model=case.model.model_copy(update=RATES))


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def drop(x: Tensor, site: int, rate: float) -> Tensor:
    """The definition on numpy's unsigned integers: x [4, T, D]."""
    low, high = (np.array([draw >> shift & 0xFFFFFFFF for draw in DRAW.tolist()], np.uint32) for shift in (0, 32))
    sample = mix(mix(mix(np.array(SEED & 0xFFFFFFFF, np.uint32)[None]) ^ low) ^ high ^ np.uint32(site))
    token = mix(sample[:, None] ^ np.arange(x.shape[1], dtype=np.uint32))
    keep = mix(token[..., None] ^ np.arange(x.shape[2], dtype=np.uint32)) >= rate * 2**32
    return x * torch.from_numpy(keep) / (1 - rate)


def plain_blocks(model: LanguageModel | Encoder, x: Tensor, context: SequenceContext) -> Tensor:
    """The normed residual stream of x [4, T, D], the embedding's output: one sub-layer after the other."""
    x, site = drop(x, 0, RATES["embedding_dropout"]), 1
    for block in model.block_list():
        branch = x
        for sublayer, own in zip(block.sublayers, block.contexts(context), strict=True):
            y = sublayer.mixer(sublayer.norm(branch), own, None).y
            branch, site = x + drop(y, site, RATES["hidden_dropout"]), site + 2
            x = branch if sublayer.residual == "add" else x
    return model.norm(x)


def outcome(model: LanguageModel | Encoder, output: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of a sum of it with weights."""
    model.zero_grad()
    (output * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None} | {"": output.detach()}


@pytest.mark.parametrize(
    "case", [HYBRID, *(CASES[NAMES.index(name)] for name in ("cosformer2", "rodimus"))], ids=lambda case: case.name
)
def test_every_sublayer_and_the_embedding_have_their_own_mask(case: Case):
    """Two hops, an input layer, and a residual stream of its own dtype."""
    built, inputs = build(dropped(case).model, seed=SEED), make_inputs()
    x = built.embedding.embed(inputs.tokens) * built.config.embedding_scale
    context = built.context(inputs.tokens, torch.arange(LENGTH), inputs.document_ids, x.dtype)
    for layer in built.input_mixers():
        x = layer(x, layer.build_mixer_context(context), None).y
    table = built.embedding if built.head is None else built.head
    expected = outcome(built, table.logits(plain_blocks(built, x, context))[..., : built.config.vocab_size])
    logits = built(inputs.tokens, document_ids=inputs.document_ids, draw=DRAW).logits
    assert_close(outcome(built, logits[..., : built.config.vocab_size]), expected, 1e-12)


def test_every_sublayer_and_the_embedding_of_an_encoder_have_their_own_mask():
    case = encoder_cases.CASES[2]
    built, batch = encoder_cases.build(dropped(case).model, seed=SEED), encoder_cases.make_batch(case.model)
    tables = built.embedding.embed(batch.tokens), built.type_embedding(batch.token_types)
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    x = sum(tables, built.position_embedding(positions)).clamp(-1.0, 1.0)
    documents = SequenceDocuments(built.cp, batch.tokens, None, batch.valid)
    expected = outcome(built, plain_blocks(built, x, SequenceContext(positions, documents, {}, x.dtype)))
    assert_close(outcome(built, built(**batch._replace(draw=DRAW).inputs()).hidden), expected, 1e-12)


def test_none_in_eval_mode_and_an_error_without_the_numbers_of_the_samples():
    built, plain, inputs = build(dropped(HYBRID).model), build(HYBRID.model), make_inputs()
    assert torch.equal(built.eval()(inputs.tokens, draw=DRAW).logits, plain(inputs.tokens).logits)
    assert torch.equal(built(inputs.tokens).logits, plain(inputs.tokens, draw=DRAW).logits)
    state = built.initial_state(4, dtype=torch.float64)
    assert built(inputs.tokens, state=state).state is not None
    built.train()
    with pytest.raises(AssertionError, match="needs `draw`"):
        built(inputs.tokens)
    with pytest.raises(AssertionError, match="use eval mode"):
        built(inputs.tokens, state=state, draw=DRAW)


class _Operations(TorchDispatchMode):
    """Records the operations that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rates", [{}, RATES], ids=["without", "with"])
def test_a_rate_of_zero_costs_no_operation(rates: dict[str, float]):
    built, inputs = build(HYBRID.model.model_copy(update=rates)), make_inputs()
    with _Operations() as trained:
        built(inputs.tokens, draw=DRAW)
    with _Operations() as evaluated:
        built.eval()(inputs.tokens)
    assert (trained.names == evaluated.names) == (not rates)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_ten_compiled_blocks_are_one_graph(backend: str):
    built, inputs = build(model({"sublayers": [GLU], "repeat": 10}, **RATES)), make_inputs()

    def run() -> dict[str, Tensor]:
        return outcome(built, built(inputs.tokens, document_ids=inputs.document_ids, draw=DRAW).logits[..., :380])

    expected = run()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in built.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)
    assert_close(run(), expected, 1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


TWO_HOPS = Case(
    "two hops",
    model({"sublayers": [attention("tnl", residual="two_hop"), attention("hgrn2"), GLU], "repeat": 2}, **RATES),
)
ENCODER = dropped(encoder_cases.CASES[0])
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
MESHES: dict[int, Named] = {
    2: named([TWO_HOPS, ENCODER], tp=2, length=36)
    | named([TWO_HOPS, ENCODER], length=36, recompute=True, **SEQUENCE_PARALLEL)
    | named([TWO_HOPS], pp=2, pp_schedule="interleaved", pp_stages_per_rank=2, recompute=True)
    | named([TWO_HOPS], length=36, dp=2, recompute=True)
    | named([TWO_HOPS], pp=2, dtype="float32"),
    3: named([TWO_HOPS, ENCODER], cp=3, length=36, recompute=True) | named([TWO_HOPS], cp=3, dtype="float32"),
    4: named([TWO_HOPS], pp=2, dp=2),
    6: named([TWO_HOPS, ENCODER], cp=3, length=36, **SEQUENCE_PARALLEL),
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_has_the_masks_of_one_process(world_size: int):
    for found in compared(world_size, MESHES[world_size], {})[0].values():
        assert_agrees(found)
