"""What ops do with tensors that do not fit: an error that says which and why, or the slower path; never garbage."""

from functools import partial

import pytest
import torch

from megalin.errors import KernelError, OperandError
from megalin.ops.decay_scan import decay_scan, decay_scan_reference, decay_step
from megalin.ops.gated_squares import gated_squares
from megalin.ops.linear_cross_entropy import VocabularySlice, fused_linear_cross_entropy
from megalin.ops.max_norm import encoded_max_norm, max_norm
from megalin.ops.operands import check_operands
from megalin.ops.rms_norm import rms_norm
from megalin.ops.scalar_decay_scan import scalar_decay_scan
from megalin.ops.silu_lrpe import silu_lrpe
from megalin.ops.srmsnorm import srmsnorm, srmsnorm_reference
from megalin.ops.vector_decay_scan import vector_decay_scan, vector_decay_step

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


OPS = {
    "decay_scan": (decay_scan, scan("slopes")),
    "decay_step": (decay_step, step("slopes")),
    "vector_decay_scan": (vector_decay_scan, scan("log_decay")),
    "vector_decay_step": (vector_decay_step, step("log_decay")),
    "scalar_decay_scan": (scalar_decay_scan, {**scan("log_decay"), "log_decay": -ones(B, T, H)}),
    "rms_norm": (partial(rms_norm, eps=1e-6), {"x": ones(B, T, WIDTH), "weight": ones(WIDTH)}),
    "gated_squares": (gated_squares, {"x": ones(B, T, WIDTH), "gate": ones(B, T, WIDTH), "weight": ones(WIDTH)}),
    "max_norm": (
        partial(encoded_max_norm, num_places=8, num_heads=2, eps=1e-6),
        {"x": ones(B, T, WIDTH), "factor": ones(B, T), "positions": ones(T, dtype=torch.int64)},
    ),
    "silu_lrpe": (
        partial(silu_lrpe, form="cosine"),
        {"projection": ones(B, T, 3, H, K), "theta": ones(H, K), "positions": ones(B, T, dtype=torch.int64)},
    ),
    "linear_cross_entropy": (
        partial(fused_linear_cross_entropy, vocabulary=VocabularySlice(0, V), ignored_label=-100),
        {"x": ones(T, K), "weight": ones(V, K), "labels": ones(T, dtype=torch.int64), "token_weights": ones(T)},
    ),
}
OPERANDS = [(op, name) for op, (_, tensors) in OPS.items() for name in tensors]
# The first tensor says the sizes: it is what the others do not fit.
LATER = [(op, name) for op, name in OPERANDS if name != next(iter(OPS[op][1]))]
ANY_RANK = {("rms_norm", "x"), ("gated_squares", "x"), ("gated_squares", "gate")}
ANY_RANK |= {("max_norm", "positions"), ("silu_lrpe", "positions")}  # [T] or [B, T]
# Leading sizes that no other tensor knows: the rows of a head.
FREE = {("linear_cross_entropy", "weight"): 1}


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
        with pytest.raises(OperandError, match=rf"{op}: {name} has shape .*; it takes \["):
            call(op, **{name: changed})


@pytest.mark.parametrize(("op", "name"), LATER)
def test_each_size_that_disagrees_is_told_with_the_tensor_that_set_it(op, name):
    tensor = OPS[op][1][name]
    for dim in range(FREE.get((op, name), 0), tensor.dim()):
        longer = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        with pytest.raises(OperandError, match=rf"{op}: \w+ has shape .* but .* by \w+; they must be equal"):
            call(op, **{name: longer})


@pytest.mark.parametrize(("op", "name"), OPERANDS)
def test_the_wrong_kind_of_numbers(op, name):
    tensor = OPS[op][1][name]
    other = tensor.double() if not tensor.is_floating_point() else tensor.long()
    wanted = "integers" if not tensor.is_floating_point() else "floating-point numbers"
    with pytest.raises(OperandError, match=rf"{op}: {name} is of {other.dtype}; give it as {wanted}"):
        call(op, **{name: other})
    with pytest.raises(OperandError, match=rf"{op}: {name} is of torch.complex64"):
        call(op, **{name: tensor.to(torch.complex64)})


@pytest.mark.parametrize(("op", "name"), LATER)
def test_tensors_on_different_devices(op, name):
    with pytest.raises(OperandError, match=rf"{op}: {name} is on meta, \w+ on cpu; move both to one device"):
        call(op, **{name: OPS[op][1][name].to("meta")})


@pytest.mark.parametrize("op", ["decay_scan", "vector_decay_scan", "scalar_decay_scan"])
def test_a_scan_over_no_tokens(op):
    tensors = OPS[op][1]
    empty = {name: x[:, :0] for name, x in tensors.items() if name not in ("slopes", "initial_state")}
    with pytest.raises(OperandError, match=rf"{op}: v has shape \(2, 0, 3, 6\), no token; give at least one"):
        call(op, **empty)


def test_heads_that_do_not_divide_a_width():
    with pytest.raises(OperandError, match="max_norm: 5 heads do not divide a width of 12"):
        encoded_max_norm(ones(B, T, WIDTH), ones(B, T), ones(T).long(), num_places=8, num_heads=5, eps=1e-6)
    with pytest.raises(OperandError, match="silu_lrpe: theta has 3 frequencies a head, which turn 6 channels, but "):
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
    with pytest.raises(OperandError, match=r"op: q has shape \(2, 2\), \[B, H or 1\], but H = 3 by v; they must be"):
        check_operands("op", {"v": (ones(2, 3), "BH"), "q": (ones(2, 2), "Bh")})
