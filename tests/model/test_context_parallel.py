"""Models under context parallelism: bytes sent by each layer, isolation of documents to the bit, compiled blocks."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from megalin.data.batch import AnyBatch, Batch, EncoderBatch, split_tokens
from megalin.model.build import Model, make_model
from megalin.model.config import EncoderConfig
from megalin.parallel.config import ExchangeName, ParallelConfig
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor
from megalin.train.step import accumulate_gradients
from tests.cases import CASES, GLU, HEAD, HIDDEN_SIZE, NUM_HEADS, SHARED_KEY, VOCAB_SIZE, model
from tests.encoder_cases import CASES as ENCODERS
from tests.model.test_collective_counts import TP, Call, CollectiveRecorder
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, materialise, to_arrays, to_tensors
from tests.ranks import run_ranks

GATHER, SCATTER, REDUCE, ALL_TO_ALL = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
)
CP = TP
"""Ranks of the axis; CollectiveRecorder multiplies the size of a gathered shard by this number."""
ROWS = 3
MODELS = {case.name: case.model for case in [*CASES, *ENCODERS]}
MODELS["three-heads"] = model({"sublayers": [{"type": "softmax", "num_heads": 3}, GLU], "repeat": 2})
MODELS["two-attentions"] = model({"sublayers": [{"type": "softmax", "num_heads": 12}, SHARED_KEY, GLU], "repeat": 2})


def on_axis(
    size: int, name: str, *, compute_dtype: torch.dtype, backend: str | None = None, exchange: ExchangeName = "auto"
) -> tuple[Mesh, Model]:
    """An initialised model under context parallelism over `size` ranks; if compiled, with recomputation."""
    mesh = Mesh(ParallelConfig(cp=size, cp_exchange=exchange), torch.device("cpu"))
    model = make_model(MODELS[name], mesh.tp, cp=mesh.cp, recompute=backend is not None).to(compute_dtype)
    if backend is not None:
        for block in model.block_list():
            block.compile(fullgraph=True, dynamic=False, backend=backend)
    shard_model(
        model, model.block_list(), model.full_precision_modules(), mesh, compute_dtype=compute_dtype, head=model.head
    )
    materialise(model)
    return mesh, model


def packed(length: int, *, first: int = 0) -> Batch:
    """Sequences of two documents; `first` changes the tokens of the first one. The second starts one token before the
    second third of the sequence, at the last third, and one token after that."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, VOCAB_SIZE, (ROWS, length), generator=generator) for _ in range(2))
    starts = torch.tensor([length // 3 - 1, 2 * length // 3, 2 * length // 3 + 1])[:, None]
    document_ids = (torch.arange(length) >= starts).to(torch.int32)
    tokens = torch.where(document_ids == 0, (tokens + first) % VOCAB_SIZE, tokens)
    return Batch(tokens, labels, document_ids, torch.arange(ROWS))


def gathered(numbers: int) -> int:
    """Bytes of an all-gather of that many fp32 numbers a sequence and rank."""
    return 4 * CP * ROWS * numbers


RECURRENT = {case.name: case.cp for case in CASES if case.cp is not None}
"""One case of each recurrence, with its collectives."""
DOCUMENTS = gathered(2)
"""Bytes of the document ids at the ends of the shards, once a batch."""


PREDICTIONS = 6


def pairs(length: int) -> EncoderBatch:
    """Sequences of two segments, padded at the end."""
    tokens, labels = packed(length).tokens, packed(length).labels[:, :PREDICTIONS]
    valid = torch.arange(length) < length - torch.tensor([0, 3, 7])[:, None]
    positions = torch.arange(PREDICTIONS).expand(ROWS, -1) * 2
    types = (torch.arange(length) > length // 2).long().expand(ROWS, -1)
    return EncoderBatch(tokens, types, valid, positions, labels, torch.tensor([0, 1, 0]), torch.arange(ROWS))


def batch_for(name: str, length: int) -> AnyBatch:
    return pairs(length) if isinstance(MODELS[name], EncoderConfig) else packed(length)


def _calls(
    names: tuple[str, ...], lengths: tuple[int, ...], exchange: ExchangeName = "auto"
) -> dict[tuple[str, int], Counter[Call]]:
    found = {}
    for name in names:
        mesh, model = on_axis(CP, name, compute_dtype=torch.float32, exchange=exchange)
        for length in lengths:
            with CollectiveRecorder() as recorder:
                accumulate_gradients(model, [split_tokens(batch_for(name, length), mesh.cp)], mesh)
            calls = {call: count for call, count in recorder.calls.items() if not call.name.startswith("c10d.")}
            # Without the loss and the count of labels, summed over the data axis.
            calls = {call: count for call, count in calls.items() if call.name == ALL_TO_ALL or call.num_bytes > 16}
            found[name, length] = Counter(calls)
    return found


def test_a_layer_sends_its_state_and_halo_whatever_the_length():
    lengths = (24, 96)
    for calls in run_ranks(CP, _calls, tuple(RECURRENT), lengths):
        for name, sent in RECURRENT.items():
            num_layers = MODELS[name].num_layers
            expected: Counter[Call] = Counter()
            expected[Call("forward", "all_gather_into_tensor", DOCUMENTS)] += 1
            if sent.window_ids:
                expected[Call("forward", "all_gather_into_tensor", gathered(sent.window_ids))] += 1
            for direction in ("forward", "backward"):
                expected[Call(direction, "all_gather_into_tensor", gathered(sent.state))] += num_layers
            for halo in map(gathered, sent.halos):
                expected[Call("forward", "all_gather_into_tensor", halo)] += num_layers
                expected[Call("backward", "reduce_scatter_tensor", halo)] += num_layers
            if sent.input_state:
                for direction in ("forward", "backward"):
                    expected[Call(direction, "all_gather_into_tensor", gathered(sent.input_state))] += 1
            assert [calls[name, length] for length in lengths] == [expected, expected], name


def conjugate(forward: str, backward: str, num_bytes: int, count: int) -> Counter[Call]:
    return Counter({Call("forward", forward, num_bytes): count, Call("backward", backward, num_bytes): count})


def test_states_sent_in_turn_go_once_to_the_next_rank_and_no_decay_is_sent():
    names, lengths, num_turns = ("transnormer", "hgrn2"), (24, 96), CP - 1
    by_rank = run_ranks(CP, _calls, names, lengths, "ring")
    for name, length in product(names, lengths):
        for direction in ("forward", "backward"):
            calls = [
                {
                    call.num_bytes: count
                    for call, count in rank[name, length].items()
                    if call[:2] == (direction, ALL_TO_ALL)
                }
                for rank in by_rank
            ]
            numbers = RECURRENT["transnormer"].state if name == "transnormer" else NUM_HEADS * HEAD * HEAD
            state, num_layers = gathered(numbers) // CP, MODELS[name].num_layers
            ring_tokens = 4 * CP * num_turns * num_layers  # a number for each rank and turn
            sent = sum(size * count for rank in calls for size, count in rank.items())
            assert sent == (CP - 1) * num_layers * state + ring_tokens
            assert [sum(rank.values()) for rank in calls] == [num_turns * num_layers] * CP


def test_softmax_attention_sends_its_heads_or_gathers_keys_and_values():
    """All-to-alls of a rank's tokens of q, k, v and y; if cp does not divide the heads, all-gathers of k and v."""
    names, length = ("softmax", "softmax-grouped", "three-heads"), 24
    ids = Counter({Call("forward", GATHER, gathered(2)): 1, Call("forward", GATHER, 4 * ROWS * length): 1})
    shard_bytes = 4 * ROWS * length // CP * HIDDEN_SIZE
    back = conjugate(ALL_TO_ALL, ALL_TO_ALL, shard_bytes, 2)
    expected = {
        "softmax": conjugate(ALL_TO_ALL, ALL_TO_ALL, 3 * shard_bytes, 2) + back,
        "softmax-grouped": conjugate(ALL_TO_ALL, ALL_TO_ALL, 2 * shard_bytes, 2) + back,
        "three-heads": conjugate(GATHER, SCATTER, CP * shard_bytes, 4),
    }
    for calls in run_ranks(CP, _calls, names, (length,)):
        for name in names:
            assert calls[name, length] == expected[name] + ids, name


def test_an_encoder_sends_its_sums_whatever_the_length():
    """X^T X of a layer, or of its first and last window where windows cross shards; states of both directions; tokens
    that the heads select. Softmax attention alone sends its tokens."""
    names, lengths = ("one-head", "local", "two-way", "bert"), (24, 40)
    picked = 4 * ROWS * PREDICTIONS * HIDDEN_SIZE
    heads = conjugate(SCATTER, GATHER, picked, 1) + conjugate(REDUCE, REDUCE, 4 * ROWS * HIDDEN_SIZE, 1)
    four_heads = ROWS * HIDDEN_SIZE * HIDDEN_SIZE  # H (D / H)^2 numbers of 4 bytes each, H = 4
    windows = 2 * CP * four_heads
    for calls in run_ranks(CP, _calls, names, lengths):
        for length in lengths:
            valid = Counter({Call("forward", GATHER, ROWS * length): 1})
            sums = conjugate(REDUCE, REDUCE, 4 * ROWS * HIDDEN_SIZE**2, 2)
            assert calls["one-head", length] == heads + sums + valid
            # Shifted windows always cross shards; the others, of 8 tokens, do where 8 does not divide a shard.
            crossing = 2 if length // CP % 8 else 1
            around = conjugate(GATHER, SCATTER, windows, crossing)
            assert calls["local", length] == heads + conjugate(REDUCE, REDUCE, four_heads, 1) + around + valid
            states = conjugate(GATHER, GATHER, gathered(RECURRENT["hgrn2"].state), 2 * 2)
            assert calls["two-way", length] == heads + states + valid
            shard_bytes = 4 * ROWS * length // CP * HIDDEN_SIZE
            moved = conjugate(ALL_TO_ALL, ALL_TO_ALL, 3 * shard_bytes, 2) + conjugate(
                ALL_TO_ALL, ALL_TO_ALL, shard_bytes, 2
            )
            assert calls["bert", length] == heads + moved + valid


def _second_document(names: tuple[str, ...]) -> dict[str, list[Arrays]]:
    """Logits and losses of the second document, and the gradients of its losses, for two contents of the first."""
    found: dict[str, list[Arrays]] = {}
    for name in names:
        mesh, model = on_axis(3, name, compute_dtype=torch.float64)
        found[name] = []
        for first in (0, 7):
            batch = split_tokens(packed(24, first=first), mesh.cp)
            second = batch.document_ids == 1
            output = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
            (output.token_losses * second).sum().backward()
            tensors = {key: full_tensor(parameter.grad) for key, parameter in model.named_parameters()}
            tensors |= {"losses": output.token_losses[second], "logits": output.logits[second]}
            found[name].append(to_arrays(tensors))
            model.zero_grad(set_to_none=True)
    return found


@pytest.mark.slow
def test_another_document_does_not_move_a_bit_across_ranks():
    for found in run_ranks(3, _second_document, (*RECURRENT, "softmax", "three-heads", "two-attentions")):
        for name, (one, other) in found.items():
            for key in one:
                assert (one[key] == other[key]).all(), (name, key)


def _gradients(name: str, backend: str | None, exchange: ExchangeName) -> Arrays:
    mesh, model = on_axis(2, name, compute_dtype=torch.float32, backend=backend, exchange=exchange)
    sums = model.loss_sums(split_tokens(batch_for(name, 40), mesh.cp).inputs())
    sums.sum().backward()
    found = {key: full_tensor(parameter.grad) for key, parameter in model.named_parameters()}
    return to_arrays(found | {"sums": sums})


AS_INDUCTOR_CUTS = "aot_eager_decomp_partition"
"""Backend that partitions a block's graph into forward and backward as inductor does, but compiles neither."""
COMPILED: tuple[tuple[str, ExchangeName, str], ...] = (("hgrn2", "ring", AS_INDUCTOR_CUTS),)
MORE_COMPILED: tuple[tuple[str, ExchangeName, str], ...] = (
    ("transnormer-cosine", "ring", AS_INDUCTOR_CUTS),
    ("rodimus", "auto", AS_INDUCTOR_CUTS),
    ("local", "auto", AS_INDUCTOR_CUTS),
    ("bert", "auto", AS_INDUCTOR_CUTS),
    ("two-way", "ring", AS_INDUCTOR_CUTS),
    ("softmax-grouped", "auto", AS_INDUCTOR_CUTS),
    ("softmax-grouped", "auto", "inductor"),  # several all-to-alls in a block, and quick to compile
)


def _compiled(cases: tuple[tuple[str, ExchangeName, str], ...]) -> list[tuple[Arrays, Arrays, int]]:
    torch._inductor.config.fx_graph_cache = False  # the keys differ between ranks, so no entry is reused
    torch._inductor.config.cpp.simdlen = 1  # generating vectorised code, not tested here, takes half of inductor's time
    found = []
    for name, exchange, backend in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        pair = _gradients(name, None, "auto"), _gradients(name, backend, exchange)
        found.append((*pair, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.parametrize("cases", [COMPILED, pytest.param(MORE_COMPILED, marks=pytest.mark.slow)], ids=["", "more"])
def test_compiled_blocks_that_recompute_have_the_gradients_of_eager_ones(cases):
    for results in run_ranks(2, _compiled, cases, timeout=400.0):
        for (name, *_), (eager, compiled, num_graphs) in zip(cases, results, strict=True):
            assert num_graphs > 0, name
            assert_close(to_tensors(compiled), to_tensors(eager), 2e-5)
