"""Ops on tensors that do not fit: an error with the tensor and the reason, or the slower path; never garbage."""

from functools import partial

import pytest
import torch

from megalin.errors import KernelError, OperandError
from megalin.ops.attention.causal import causal_attention
from megalin.ops.attention.dense import dense_attention, local_dense_attention
from megalin.ops.attention.local import LocalCache, block_attention, local_attention
from megalin.ops.attention.softmax import softmax_attention
from megalin.ops.attention.window import WindowCache, window_attention
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.documents import PackedDocuments
from megalin.ops.gates.forget_gate_scan import forget_gate_scan
from megalin.ops.gates.gated_product import gated_product
from megalin.ops.linear_cross_entropy import VocabularySlice, fused_linear_cross_entropy
from megalin.ops.norms.gated_squares import gated_squares
from megalin.ops.norms.max_norm import encoded_max_norm, max_norm
from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.norms.srmsnorm import srmsnorm, srmsnorm_reference
from megalin.ops.positions.activated_lrpe import activated_lrpe
from megalin.ops.positions.encodings import (
    cosine_relpe,
    document_spans,
    lrpe_cosine,
    lrpe_rotation,
    num_tokens_in_documents,
    rope,
)
from megalin.ops.positions.lrpe_states import enter_segments, move_origin
from megalin.ops.positions.relpe import relpe
from megalin.ops.positions.silu_lrpe import silu_lrpe
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_reference
from megalin.ops.scans.fixed_decay_step import decay_step
from megalin.ops.scans.scalar_decay import scalar_decay_scan
from megalin.ops.scans.selective_scan import selective_scan, selective_step
from megalin.ops.scans.states import decay_state, selected_state, tpe_state
from megalin.ops.scans.tpe import tpe, tpe_step
from megalin.ops.scans.vector_decay import vector_decay_scan
from megalin.ops.scans.vector_decay_step import vector_decay_step

B, T, H, K, V = 2, 5, 3, 8, 6
WIDTH = 12


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def scan(decay):
    return {
        "v": ones(B, T, H, V),
        "q": ones(B, T, H, K),
        "k": ones(B, T, H, K),
        decay: ones(H) if decay == "slopes" else -ones(B, T, H, K),
        "initial_state": ones(B, H, K, V),
        "document_ids": ones(B, T, dtype=torch.int32),
    }


def step(decay):
    values = {"v": ones(B, H, V), "q": ones(B, H, K), "k": ones(B, H, K), "state": ones(B, H, K, V)}
    return values | {decay: ones(H) if decay == "slopes" else -ones(B, H, K)}


def ids():
    return ones(B, T, dtype=torch.int32)


def heads(key, value):
    return {"q": ones(B, T, H, key), "k": ones(B, T, H, key), "v": ones(B, T, H, value)}


def of_documents(attention):
    return lambda document_ids, **others: attention(**others, documents=PackedDocuments(document_ids))


def recurrence(*leading):
    return {"x": ones(*leading, WIDTH), "coefficients": ones(WIDTH, K), "log_decay": -ones(K)}


OPS = {
    "decay_scan": (decay_scan, scan("slopes")),
    "decay_step": (decay_step, step("slopes")),
    "vector_decay_scan": (vector_decay_scan, scan("log_decay")),
    "vector_decay_step": (vector_decay_step, step("log_decay")),
    "forget_gate_scan": (
        forget_gate_scan,
        {
            "v": ones(B, T, H, V),
            "q": ones(B, T, H, K),
            "logit": ones(B, T, H, K),
            "bound": ones(H, K) / 2,
            "initial_state": ones(B, H, K, V),
            "document_ids": ids(),
        },
    ),
    "scalar_decay_scan": (scalar_decay_scan, {**scan("log_decay"), "log_decay": -ones(B, T, H)}),
    "selective_scan": (
        selective_scan,
        {
            "v": ones(B, T, WIDTH),
            "q": ones(B, T, K),
            "k": ones(B, T, K),
            "step": ones(B, T, WIDTH),
            "rates": -ones(WIDTH, K),
            "initial_state": ones(B, WIDTH, K),
            "document_ids": ids(),
        },
    ),
    "selective_step": (
        selective_step,
        {
            "v": ones(B, WIDTH),
            "q": ones(B, K),
            "k": ones(B, K),
            "step": ones(B, WIDTH),
            "rates": -ones(WIDTH, K),
            "state": ones(B, WIDTH, K),
        },
    ),
    "rms_norm": (partial(rms_norm, eps=1e-6), {"x": ones(B, T, WIDTH), "weight": ones(WIDTH)}),
    "gated_squares": (gated_squares, {"x": ones(B, T, WIDTH), "gate": ones(B, T, WIDTH), "weight": ones(WIDTH)}),
    "max_norm": (
        partial(encoded_max_norm, num_positions=8, num_heads=2, eps=1e-6),
        {"x": ones(B, T, WIDTH), "factor": ones(B, T), "positions": ones(T, dtype=torch.int64)},
    ),
    "silu_lrpe": (
        partial(silu_lrpe, form="cosine"),
        {"projection": ones(B, T, 3, H, K), "theta": ones(H, K), "positions": ones(B, T, dtype=torch.int64)},
    ),
    "activated_lrpe": (
        partial(activated_lrpe, form="cosine", activation="1+elu"),
        {"projection": ones(B, T, 3, H, K), "theta": ones(H, K), "positions": ones(B, T, dtype=torch.int64)},
    ),
    "tpe": (tpe, {**recurrence(B, T), "state": ones(B, WIDTH, K), "document_ids": ids()}),
    "tpe_step": (tpe_step, {**recurrence(B), "state": ones(B, WIDTH, K)}),
    "tpe_state": (tpe_state, {**recurrence(B, T), "document_ids": ids()}),
    "decay_state": (
        decay_state,
        {"k": ones(B, T, H, K), "v": ones(B, T, H, V), "slopes": ones(H), "document_ids": ids()},
    ),
    "enter_segments": (
        partial(enter_segments, form="cosine", length=T),
        {
            "added": ones(B, 1, H, K, V),
            "theta": ones(H, K // 2),
            "slopes": ones(H),
            "initial": ones(B, H, K, V),
            "document_ids": ids(),
        },
    ),
    "move_origin": (
        partial(move_origin, tokens=1, form="cosine"),
        {"state": ones(B, H, K, V), "theta": ones(H, K // 2)},
    ),
    "selected_state": (
        selected_state,
        {"v": ones(B, T, H, V), "k": ones(B, T, H, K), "log_decay": -ones(B, T, H, K), "document_ids": ids()},
    ),
    "dense_attention": (dense_attention, heads(K, V) | {"document_ids": ids()}),
    "softmax_attention": (softmax_attention, heads(K, K) | {"visible": ones(B, T, T, dtype=torch.bool)}),
    "causal_attention": (of_documents(causal_attention), heads(K, K) | {"document_ids": ids()}),
    "window_attention": (
        of_documents(partial(window_attention, window=2)),
        {"q": ones(B, T, H, K), "k": ones(B, T, K), "v": ones(B, T, H, K), "document_ids": ids()},
    ),
    "local_attention": (
        partial(
            local_attention, cache=LocalCache(ones(B, 3, H, K), ones(B, 3, H, K), ones(B, 3)), window=3, num_sinks=1
        ),
        heads(K, K) | {"document_ids": ids()},
    ),
    "block_attention": (partial(block_attention, block=2), heads(K, K)),
    "relpe": (
        partial(relpe, form="rope"),
        {"x": ones(B, T, H, K), "theta": ones(K), "positions": ids()},
    ),
    "rope": (rope, {"x": ones(B, T, H, K), "positions": ids()}),
    "lrpe_cosine": (lrpe_cosine, {"x": ones(B, T, H, K), "theta": ones(H, K), "positions": ids()}),
    "lrpe_rotation": (lrpe_rotation, {"x": ones(B, T, H, K), "theta": ones(H, K // 2), "positions": ids()}),
    "cosine_relpe": (cosine_relpe, {"x": ones(B, T, H, K), "positions": ids()}),
    "num_tokens_in_documents": (
        num_tokens_in_documents,
        {"document_ids": ids(), "valid": ones(B, T, dtype=torch.bool)},
    ),
    "linear_cross_entropy": (
        partial(fused_linear_cross_entropy, vocabulary=VocabularySlice(0, V), ignored_label=-100),
        {"x": ones(T, K), "weight": ones(V, K), "labels": ones(T, dtype=torch.int64), "token_weights": ones(T)},
    ),
}
OPERANDS = [(op, name) for op, (_, tensors) in OPS.items() for name in tensors]
# The first tensor sets the sizes that the others must match.
LATER = [(op, name) for op, name in OPERANDS if name != next(iter(OPS[op][1]))]
ANY_RANK = {("rms_norm", "x"), ("gated_squares", "x"), ("gated_squares", "gate")}
ENCODINGS = ("max_norm", "silu_lrpe", "activated_lrpe", "relpe", "rope", "lrpe_cosine", "lrpe_rotation", "cosine_relpe")
ANY_RANK |= {(op, "positions") for op in ENCODINGS}  # [T] or [B, T]
# Number of leading sizes that no other tensor has: the rows of a head.
FREE = {("linear_cross_entropy", "weight"): 1}
UNSHARED = {("lrpe_rotation", "theta"): 1, ("decay_state", "v"): 1, ("dense_attention", "v"): 1}
UNSHARED |= {("enter_segments", "theta"): 1, ("enter_segments", "document_ids"): 1, ("move_origin", "theta"): 1}
"""Number of last sizes that no other tensor has."""


def call(op, **changes):
    function, tensors = OPS[op]
    return function(**{**tensors, **changes})


@pytest.mark.parametrize("op", [op for op in OPS if op != "linear_cross_entropy"])
def test_what_fits_runs(op):
    call(op)


@pytest.mark.parametrize(("op", "name"), OPERANDS)
def test_one_dimension_too_few_or_too_many(op, name):
    tensor = OPS[op][1][name]
    if (op, name) in ANY_RANK:
        return
    for changed in (tensor[None], tensor[0]):
        with pytest.raises(OperandError, match=rf"{op}: {name} has shape .*, but must be \["):
            call(op, **{name: changed})


@pytest.mark.parametrize(("op", "name"), LATER)
def test_each_mismatched_size_is_reported_with_the_tensor_that_set_it(op, name):
    tensor = OPS[op][1][name]
    for dim in range(FREE.get((op, name), 0), tensor.dim() - UNSHARED.get((op, name), 0)):
        longer = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        with pytest.raises(OperandError, match=rf"{op}: \w+ has shape .* but .* in \w+; they must be equal"):
            call(op, **{name: longer})


@pytest.mark.parametrize(("op", "name"), OPERANDS)
def test_the_wrong_kind_of_numbers(op, name):
    tensor = OPS[op][1][name]
    other = tensor.double() if not tensor.is_floating_point() else tensor.long()
    kinds = {torch.bool: "bools", torch.int32: "integers", torch.int64: "integers"}
    expected = kinds.get(tensor.dtype, "floating point")
    with pytest.raises(OperandError, match=rf"{op}: {name} has dtype {other.dtype}, but must be {expected}"):
        call(op, **{name: other})
    with pytest.raises(OperandError, match=rf"{op}: {name} has dtype torch.complex64"):
        call(op, **{name: tensor.to(torch.complex64)})


@pytest.mark.parametrize(("op", "name"), LATER)
def test_tensors_on_different_devices(op, name):
    with pytest.raises(OperandError, match=rf"{op}: {name} is on meta, \w+ on cpu; move both to one device"):
        call(op, **{name: OPS[op][1][name].to("meta")})


FIRST = {
    **dict.fromkeys(["decay_scan", "vector_decay_scan", "scalar_decay_scan", "selected_state"], "v"),
    "forget_gate_scan": "v",
    **dict.fromkeys(["dense_attention", "softmax_attention", "causal_attention", "window_attention"], "q"),
    **dict.fromkeys(["tpe", "tpe_state", "rope"], "x"),
    "decay_state": "k",
    "num_tokens_in_documents": "document_ids",
}


@pytest.mark.parametrize("op", FIRST)
def test_no_tokens(op):
    own = [name for name, x in OPS[op][1].items() if x.dim() > 1 and x.shape[:2] == (B, T)]
    empty = {name: OPS[op][1][name][:, :0] for name in own}
    with pytest.raises(OperandError, match=rf"{op}: {FIRST[op]} has shape \(2, 0.*no tokens; give at least one"):
        call(op, **empty)


@pytest.mark.parametrize("op", ["dense_attention", "softmax_attention", "causal_attention"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_queries_keys_and_values_are_of_one_dtype(op, name):
    message = rf"{op}: {name} has dtype torch.bfloat16, q torch.float32; they must be equal"
    with pytest.raises(OperandError, match=message):
        call(op, **{name: OPS[op][1][name].bfloat16()})


@pytest.mark.parametrize("op", ["softmax_attention", "causal_attention"])
def test_key_value_heads_divide_the_query_heads(op):
    with pytest.raises(OperandError, match=rf"{op}: 2 key-value heads do not divide 3 query heads; use a divisor"):
        call(op, **{name: ones(B, T, 2, K) for name in ("k", "v")})


def test_windows_that_no_attention_has():
    with pytest.raises(OperandError, match="window_attention: window = 0 excludes the token itself; use at least 1"):
        window_attention(ones(B, T, H, K), ones(B, T, K), ones(B, T, H, K), window=0)
    with pytest.raises(OperandError, match="causal_attention: window = -3 excludes the token itself; use at least 1"):
        causal_attention(*(ones(B, T, H, K) for _ in "qkv"), window=-3)
    with pytest.raises(OperandError, match="causal_attention: 5 queries for 4 keys; give at most one query per key"):
        causal_attention(ones(B, 5, H, K), ones(B, 4, H, K), ones(B, 4, H, K), window=3)
    for offset in (-1, 4):
        with pytest.raises(OperandError, match=rf"windows of 4 tokens cannot start {offset} before a document; the "):
            local_dense_attention(*heads(K, V).values(), window=4, offset=offset)


def test_a_cache_is_of_its_window():
    tensors = {name: x for name, x in OPS["window_attention"][1].items() if name != "document_ids"}
    cache = WindowCache(ones(B, 3, K), ones(B, 3, H, K), ones(B, 3))
    assert window_attention(**tensors, window=4, cache=cache).cache.k.shape == (B, 3, K)
    with pytest.raises(OperandError, match="cache holds 3 tokens, but window = 5 needs 4; they must be equal"):
        window_attention(**tensors, window=5, cache=cache)
    with pytest.raises(OperandError, match=r"cache\.v has shape \(2, 3, 3, 9\) = \[B, P, H, K\], but K = 8 in q"):
        window_attention(**tensors, window=4, cache=cache._replace(v=ones(B, 3, H, K + 1)))


def test_odd_widths_and_wrong_numbers_of_frequencies():
    with pytest.raises(OperandError, match=r"gated_product: gate_value has shape \(2, 7\); its width must be even"):
        gated_product(ones(2, 7), activation="none")
    with pytest.raises(OperandError, match=r"gated_product: gate_value has dtype torch\.int64, but must be floating"):
        gated_product(ones(2, 8).long(), activation="none")
    with pytest.raises(OperandError, match=r"gated_product: gate_value has shape \(\), but must be \[\.\.\., W\]"):
        gated_product(ones(), activation="none")
    with pytest.raises(OperandError, match="rope: head dimension 7 is odd, but channels rotate in pairs; use an"):
        rope(ones(B, T, H, 7), ids())
    with pytest.raises(OperandError, match="lrpe_rotation: theta has 3 frequencies per head, for 6 channels, but"):
        lrpe_rotation(ones(B, T, H, K), ones(H, 3), ids())


def test_document_ids_are_a_matrix_of_integers():
    with pytest.raises(OperandError, match=r"document_spans: document_ids has shape \(5,\), but must be \[B, T\]"):
        document_spans(ids()[0])


def test_a_position_without_a_cosine_gives_nan_and_not_the_value_of_another():
    """In the kernel, which reads a table, and for a negative position too. Other rows do not change."""
    x = torch.randn(1, 5, WIDTH)
    options = {"num_positions": 5, "num_heads": 2, "eps": 1e-6, "backend": "triton"}
    expected = encoded_max_norm(x, ones(1, 5), torch.arange(5), **options)
    leaf = x.clone().requires_grad_()
    found = encoded_max_norm(leaf, ones(1, 5), torch.tensor([0, 1, 5, -1, 4]), **options)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    inside = [0, 1, 4]
    assert torch.equal(found[:, inside], expected[:, inside])
    assert found[:, [2, 3]].isnan().all()
    assert gradient[:, [2, 3]].isnan().all()
    assert gradient[:, inside].isfinite().all()


def test_heads_that_do_not_divide_a_width():
    with pytest.raises(OperandError, match="max_norm: 5 heads do not divide a width of 12"):
        encoded_max_norm(ones(B, T, WIDTH), ones(B, T), ones(T).long(), num_positions=8, num_heads=5, eps=1e-6)
    with pytest.raises(OperandError, match="silu_lrpe: theta has 3 frequencies per head, for 6 channels, but the "):
        silu_lrpe(ones(B, T, 3, H, K), ones(H, 3), ones(T).long(), form="rotation")


def test_norms_of_no_rows_are_empty():
    x = ones(0, 8)
    results = srmsnorm(x, eps=1e-6), rms_norm(x, ones(8), eps=1e-6), max_norm(x, eps=1e-6), gated_squares(x).product
    assert [result.shape for result in results] == [(0, 8)] * 4


@pytest.mark.parametrize(
    ("function", "decay", "limit"),
    [(decay_scan, ones(1), "above 256"), (vector_decay_scan, -ones(1, 3, 1, 300), "256"),
     (scalar_decay_scan, -ones(1, 3, 1), "above 256")],
)  # fmt: skip
def test_more_keys_than_a_kernel_takes(function, decay, limit):
    q, k, v = torch.randn(1, 3, 1, 300), torch.randn(1, 3, 1, 300), torch.randn(1, 3, 1, 8)
    truth = function(*(x.double() for x in (q, k, v, decay)), backend="reference").output
    torch.testing.assert_close(function(q, k, v, decay).output.double(), truth, rtol=1e-4, atol=1e-4)
    with pytest.raises(KernelError, match=rf"the triton kernel does not take .*{limit}"):
        function(q, k, v, decay, backend="triton")


def test_rows_wider_than_a_kernel_takes():
    x = torch.randn(2, 16385)
    assert torch.equal(srmsnorm(x, eps=1e-6), srmsnorm_reference(x, eps=1e-6))
    with pytest.raises(KernelError, match="the triton kernel does not take a width of 16385, above 16384"):
        srmsnorm(x, eps=1e-6, backend="triton")


def test_dtypes_that_no_kernel_takes_go_the_slow_way():
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.float64) for _ in range(3))
    assert torch.equal(decay_scan(q, k, v, None).output, decay_scan_reference(q, k, v, None).output)
    with pytest.raises(KernelError, match=r"does not take q, k, v of torch\.float64"):
        decay_scan(q, k, v, None, backend="triton")


def test_checked_ops_compile_in_one_graph():
    function = torch.compile(lambda: call("vector_decay_scan").output, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(), call("vector_decay_scan").output)


def test_sizes_may_be_one_where_they_broadcast():
    check_operands("op", {"v": (ones(2, 3), "BH"), "q": (ones(2, 1), "Bh")})
    with pytest.raises(OperandError, match=r"op: q has shape \(2, 2\) = \[B, H or 1\], but H = 3 in v; they must be"):
        check_operands("op", {"v": (ones(2, 3), "BH"), "q": (ones(2, 2), "Bh")})
