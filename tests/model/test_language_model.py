"""Every case of tests/cases.py: the model against the independent definition, its states, packing and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megalin.layers.linear_attention import SEGMENT_CHUNKS, LinearAttention
from megalin.layers.mixers.base import State
from megalin.layers.mixers.cosformer2 import TPE
from megalin.layers.mixers.shared_key_attention import SharedKeyAttention
from megalin.model.language_model import LanguageModel, ModelState
from megalin.ops.scans import fixed_decay, vector_decay
from megalin.ops.scans.fixed_decay import ScanOutput
from megalin.parallel.embedding import padded_rows
from tests.cases import (
    CASES,
    CHUNK,
    HYBRID,
    LENGTH,
    NAMES,
    VOCAB_SIZE,
    Case,
    build,
    make_inputs,
    reference,
    weighted_loss,
)
from tests.numerics import assert_close, relative_error

BOUND = 1e-12

every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def states(state: ModelState) -> list[State]:
    return [layer for block in [*state.blocks, state.inputs] for layer in block]


def tensors(state: ModelState) -> dict[str, Tensor]:
    memory = {f"{i}.{j}": tensor for i, layer in enumerate(states(state)) for j, tensor in enumerate(layer)}
    return memory | {"positions": state.positions, "document_ids": state.document_ids}


@every_case
def test_forward_and_all_gradients_equal_the_papers_definition(case: Case):
    model, inputs = build(case.model), make_inputs()
    output = model(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    weighted_loss(output.token_losses).backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits, losses = reference(case.model, weights, inputs)
    weighted_loss(losses).backward()
    assert output.state is None
    assert_close(
        {"logits": output.logits[..., :VOCAB_SIZE], "losses": output.token_losses},
        {"logits": logits, "losses": losses},
        BOUND,
    )
    assert_close(gradients(model), {name: weight.grad for name, weight in weights.items()}, BOUND)


def test_the_sum_alone_is_that_of_the_token_losses_bit_for_bit():
    model, inputs = build(CASES[0].model), make_inputs()
    arguments = {"tokens": inputs.tokens, "labels": inputs.labels, "document_ids": inputs.document_ids}
    output = model(**arguments)
    output.token_losses.sum().backward()
    expected = gradients(model)
    model.zero_grad()
    loss = model.loss_sums(arguments)
    loss.sum().backward()
    assert torch.equal(loss, output.loss_sums())
    assert loss.shape == (1,)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())
    assert model(**arguments, losses="sum").logits is None


@every_case
def test_every_weight_changes_the_loss(case: Case):
    model, inputs = build(case.model), make_inputs()
    model(inputs.tokens, labels=inputs.labels).token_losses.sum().backward()
    for name, gradient in gradients(model).items():
        rows = gradient[:VOCAB_SIZE] if name.endswith("embedding.weight") else gradient
        assert rows.norm() > 1e-3, name


@every_case
@pytest.mark.parametrize(
    "cut", [1, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (CHUNK - 1, 20, LENGTH - 1)), CHUNK, CHUNK + 1]
)
def test_whole_equals_first_half_then_second_half(case: Case, cut: int):
    """The cuts are inside documents and at their ends, inside chunks and at their ends."""
    model, inputs = build(case.model), make_inputs()
    tokens, _, documents = inputs
    start = model.initial_state(len(tokens), dtype=torch.float64)
    with torch.no_grad():
        whole = model(tokens, document_ids=documents, state=start)
        first = model(tokens[:, :cut], document_ids=documents[:, :cut], state=start)
        second = model(tokens[:, cut:], document_ids=documents[:, cut:], state=first.state)
    both = torch.cat([first.logits, second.logits], dim=1)[..., :VOCAB_SIZE]
    assert relative_error(both, whole.logits[..., :VOCAB_SIZE]) <= BOUND
    assert_close(tensors(second.state), tensors(whole.state), BOUND)


@every_case
def test_gradients_flow_through_the_state(case: Case):
    model, inputs = build(case.model), make_inputs()
    tokens, labels, documents = inputs
    weighted_loss(model(tokens, labels=labels, document_ids=documents).token_losses).backward()
    expected, cut = gradients(model), 21
    model.zero_grad()
    start = model.initial_state(len(tokens), dtype=torch.float64)
    first = model(tokens[:, :cut], labels=labels[:, :cut], document_ids=documents[:, :cut], state=start)
    second = model(tokens[:, cut:], labels=labels[:, cut:], document_ids=documents[:, cut:], state=first.state)
    weighted_loss(torch.cat([first.token_losses, second.token_losses], dim=1)).backward()
    assert_close(gradients(model), expected, BOUND)


@every_case
def test_stepwise_decoding_equals_the_forward(case: Case):
    model, tokens = build(case.model), make_inputs().tokens
    expected = model(tokens, state=model.initial_state(len(tokens), dtype=torch.float64))
    prompt = 5
    output = model(tokens[:, :prompt], state=model.initial_state(len(tokens), dtype=torch.float64))
    logits, state = [output.logits], output.state
    for t in range(prompt, tokens.shape[1]):
        output = model.step(tokens[:, t], state)
        state = output.state
        logits.append(output.logits)
    actual = torch.cat(logits, dim=1)
    assert relative_error(actual[..., :VOCAB_SIZE], expected.logits[..., :VOCAB_SIZE]) <= BOUND
    assert_close(tensors(state), tensors(expected.state), BOUND)


@every_case
def test_a_prompt_without_document_ids_continues_its_document(case: Case):
    model, tokens = build(case.model), make_inputs().tokens
    ones = torch.ones_like(tokens, dtype=torch.int32)
    start = model.initial_state(len(tokens), dtype=torch.float64)
    whole = model(tokens, document_ids=ones, state=start)
    first = model(tokens[:, :9], document_ids=ones[:, :9], state=start)
    second = model(tokens[:, 9:], state=first.state)
    assert relative_error(second.logits[..., :VOCAB_SIZE], whole.logits[:, 9:, :VOCAB_SIZE]) <= BOUND
    assert torch.equal(second.state.document_ids, ones[:, 0])


@every_case
def test_a_document_keeps_its_bits_when_its_neighbour_changes(case: Case):
    """Compares the second document's logits and losses, and all gradients of its losses, in fp32."""
    model = build(case.model, dtype=torch.float32)
    inputs = make_inputs()
    tokens, labels, _ = inputs
    documents = (torch.arange(LENGTH) >= 19).int().expand_as(tokens).contiguous()
    labels = labels.masked_fill(documents == 0, -100)
    results = []
    for change in (0, 1):
        changed = torch.where(documents == 0, (tokens + change) % VOCAB_SIZE, tokens)
        model.zero_grad()
        output = model(changed, labels=labels, document_ids=documents)
        output.token_losses.sum().backward()
        found = {"logits": output.logits[:, 19:], "losses": output.token_losses[:, 19:]}
        results.append(found | gradients(model))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@every_case
def test_padded_rows_are_masked_and_learn_nothing(case: Case):
    model, inputs = build(case.model), make_inputs()
    output = model(inputs.tokens, labels=inputs.labels)
    output.token_losses.sum().backward()
    assert (output.logits[..., VOCAB_SIZE:] == float("-inf")).all()
    table = model.embedding if model.head is None else model.head
    assert table.weight[VOCAB_SIZE:].eq(0).all()
    assert table.weight.grad[VOCAB_SIZE:].eq(0).all()


class Recorder(TorchDispatchMode):
    """Records the operations of its body, with the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shapes = [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.operations.append((str(function), shapes))
        return result


GROWING = {"softmax"}
"""Mixers whose state grows with each token (tests/layers/test_softmax.py checks by how much)."""
CONSTANT = [
    case for case in CASES if not GROWING & {sublayer.type for _, b in case.model.blocks() for sublayer in b.sublayers}
]


@pytest.mark.parametrize("case", CONSTANT, ids=[case.name for case in CONSTANT])
def test_decoding_work_and_memory_do_not_depend_on_the_length(case: Case):
    model = build(case.model, dtype=torch.float32)
    state, tokens, steps = model.initial_state(2), torch.zeros(2, dtype=torch.int64), []
    for _ in range(30):
        with Recorder() as recorder:
            state = model.step(tokens, state).state
        held = [tensor.untyped_storage().nbytes() for tensor in tensors(state).values()]
        steps.append((recorder.operations, held))
    assert len(steps[0][0]) > 20
    assert all(step == steps[0] for step in steps)
    assert not any(tensor.requires_grad for tensor in tensors(state).values())


@every_case
def test_state_bytes_are_those_of_the_state(case: Case):
    model = build(case.model)
    state = model.initial_state(3, dtype=torch.float32)
    recurrent = [tensor for layer in states(state) for tensor in layer]
    assert recurrent
    assert all(tensor.dtype == torch.float32 and tensor.shape[0] == 3 for tensor in recurrent)
    assert 3 * model.state_bytes() == sum(tensor.numel() * 4 for tensor in recurrent)


class ScanCall(NamedTuple):
    """A call of the reference of a scan with a fixed or a vector decay."""

    fixed: bool
    value_shape: torch.Size
    """[B, T, H, V]."""
    key_dim: int
    chunk_size: int


@contextmanager
def recorded_scans() -> Iterator[list[ScanCall]]:
    """Records the scans inside its body, whose references run more matmuls than their ops count."""
    calls: list[ScanCall] = []

    def recording(function: Callable[..., ScanOutput], fixed: bool) -> Callable[..., ScanOutput]:
        def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, **options: Any) -> ScanOutput:
            calls.append(ScanCall(fixed, v.shape, k.shape[-1], options["chunk_size"]))
            return function(q, k, v, decay, **options)

        return scan

    fixed, vector = fixed_decay.decay_scan_reference, vector_decay.vector_decay_scan_reference
    with (
        patch.object(fixed_decay, "decay_scan_reference", recording(fixed, True)),
        patch.object(vector_decay, "vector_decay_scan_reference", recording(vector, False)),
    ):
        yield calls


def counted_flops(model: LanguageModel, batch: int, length: int) -> tuple[int, list[ScanCall]]:
    """Operations of a forward, and its scans."""
    counter = FlopCounterMode(display=False)
    # The counter does not count the CPU's fused attention; it counts the two matmuls of the unfused one.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH), recorded_scans() as scans:
        model(torch.zeros(batch, length, dtype=torch.int64))
    return counter.get_total_flops(), scans


def implementation_flops(model: LanguageModel, batch: int, length: int, scans: list[ScanCall]) -> int:
    """Operations that a forward runs beyond the model's own count: in scans, LRPE's segments, masked pairs of a window,
    TPE, and the padded rows of the head."""
    padding = padded_rows(model.config.vocab_size) - model.config.vocab_size
    total = batch * length * 2 * padding * model.config.hidden_size + sum(map(scan_extra, scans))
    for mixer in model.mixers():
        if isinstance(mixer, LinearAttention) and mixer.config.lrpe is not None and mixer.slopes is not None:
            state, chunk = mixer.config.num_heads * mixer.key_dim * mixer.head_dim, mixer.config.chunk_size
            tokens = min(length, SEGMENT_CHUNKS * chunk)
            segments = -(-length // tokens)
            if segments > 1:
                scan = 2 * chunk * (mixer.key_dim + mixer.head_dim) * mixer.config.num_heads + 4 * state
                total += batch * ((segments * tokens - length) * scan + segments * tokens * 2 * state)
        elif isinstance(mixer, SharedKeyAttention):
            outside = length - min(length, mixer.config.window)  # masked pairs
            total += batch * length * 4 * outside * model.config.hidden_size
    for layer in model.input_mixers():
        if isinstance(layer, TPE):
            total += tpe_extra(batch, length, layer)
    return total


def scan_extra(call: ScanCall) -> int:
    """`implementation_flops` of a scan: with a fixed decay, of the fold over chunks."""
    batch, length, num_heads, value_dim = call.value_shape
    if not call.fixed:
        return batch * num_heads * vector_scan_extra(length, call.chunk_size, call.key_dim, value_dim)
    num_chunks = -(-length // min(call.chunk_size, length))
    return batch * 2 * (num_chunks + 1) ** 2 * num_heads * call.key_dim * value_dim


def tpe_extra(batch: int, length: int, layer: TPE) -> int:
    """`implementation_flops` of TPE: taps of a chunk and the fold; `length` is a multiple of the chunk, or less."""
    chunk = min(layer.chunk_size, length)
    return 2 * layer.width * layer.num_decays * (chunk + batch * (length // chunk + 1) ** 2)


def vector_scan_extra(length: int, chunk_size: int, key_dim: int, value_dim: int) -> int:
    """`implementation_flops` of one head of the vector-decay scan: chunks are padded to sub-blocks of 16, and only the
    pairs of different sub-blocks are computed by matmuls."""
    chunk = -(-min(chunk_size, length) // 16) * 16
    pairs = sum(16 * 16 * block for block in range(chunk // 16))
    matmuls = 2 * key_dim * pairs + 2 * value_dim * chunk * chunk + 4 * chunk * key_dim * value_dim
    own = length * (2 * min(chunk_size, length) * (key_dim + value_dim) + 4 * key_dim * value_dim)
    return -(-length // chunk) * matmuls - own


@every_case
@pytest.mark.parametrize("length", [1, pytest.param(5, marks=pytest.mark.slow), 80])
def test_flops_are_those_of_a_counted_forward(case: Case, length: int):
    """Lengths of a token, at most one chunk, and several chunks."""
    model = build(case.model, dtype=torch.float32)
    counted, scans = counted_flops(model, 3, length)
    expected = counted - implementation_flops(model, 3, length, scans)
    assert 3 * length * model.forward_flops(length) == expected
    assert model.training_flops(length) == 3 * model.forward_flops(length)


@every_case
def test_recomputation_changes_no_bit(case: Case):
    inputs, results = make_inputs(), []
    for recompute in (False, True):
        model = build(case.model, dtype=torch.float32)
        for block in model.blocks:
            block.recompute = recompute
        model(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids).token_losses.sum().backward()
        results.append(gradients(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_running_positions_change_nothing():
    model, inputs = build(HYBRID.model), make_inputs()
    with torch.no_grad():
        plain = model(inputs.tokens, document_ids=inputs.document_ids)
        moved = model(
            inputs.tokens,
            document_ids=inputs.document_ids,
            positions=torch.arange(LENGTH) + torch.tensor([[0], [7], [1000], [100_000]]),
        )
    assert relative_error(moved.logits[..., :VOCAB_SIZE], plain.logits[..., :VOCAB_SIZE]) <= 1e-9


@every_case
def test_positions_that_leave_tokens_out_are_those_of_a_state(case: Case):
    """Training and decoding give the same results for any given positions."""
    model, inputs = build(case.model), make_inputs()
    positions = 3 * torch.arange(LENGTH).expand_as(inputs.tokens)
    with torch.no_grad():
        whole = model(inputs.tokens, positions=positions)
        decoding = model(
            inputs.tokens, positions=positions, state=model.initial_state(len(positions), dtype=torch.float64)
        )
    assert relative_error(whole.logits[..., :VOCAB_SIZE], decoding.logits[..., :VOCAB_SIZE]) <= 1e-9


def test_an_optimizer_step_refreshes_derived_buffers():
    case = next(case for case in CASES if case.name == "sockets")
    model = build(case.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.after_optimizer_step()
    mixers = [mixer for mixer in model.mixers() if hasattr(mixer, "ratio")]
    assert len(mixers) == 2
    for mixer in mixers:
        assert mixer.ratio < 1.0
        torch.testing.assert_close(mixer.ratio, 1.0 / mixer.out.detach().abs().max())
