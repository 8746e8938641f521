"""Softmax attention on a GPU against fp64: dtypes, documents, grouped keys, windows, compiled, equal bits."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megalin.model.language_model import LanguageModel
from megalin.ops.attention.bidirectional import bidirectional_attention, visible_in_documents
from megalin.ops.attention.causal import causal_attention, kernel_for
from megalin.ops.attention.softmax import visible_in_sequence, visible_near, visible_tokens, within_window
from megalin.ops.attention.window import window_attention
from megalin.ops.documents import UNPACKED, find_documents
from megalin.parallel.initialisation import init_weights
from tests.cases import GLU, model
from tests.numerics import assert_close, errors, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

DTYPES = [torch.bfloat16, torch.float16]
FP32_BOUND = 1e-5
"""Error bound of torch's memory-efficient attention, the kernel for fp32: its gradients err by a few times as much as
those of separate matmuls, and by far less than TF32 rounds."""
DOCUMENTS = {"whole": None, "packed": [0, 1, 2, 65, 128, 1000], "single": [*range(40), 1337]}
"""Starts of the documents of the second sample; None: every sample is one document."""


def make_heads(batch: int, length: int, heads: int, groups: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"q": heads, "k": groups, "v": groups}
    return {name: torch.randn(batch, length, n, width, device="cuda").to(dtype) for name, n in shapes.items()}


def make_documents(name: str, batch: int, length: int) -> Tensor | None:
    if DOCUMENTS[name] is None:
        return None
    starts = torch.zeros(batch, length, dtype=torch.int32, device="cuda")
    starts[1, [place for place in DOCUMENTS[name] if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32)


def unfused(q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None, window: int | None) -> list[Tensor]:
    """Attention by separate matmuls and softmax, in the inputs' dtype."""
    if document_ids is None:
        visible = visible_in_sequence(torch.arange(q.shape[1], device=q.device), q.shape[1], None)
    else:
        visible = visible_tokens(document_ids)
    if window is not None:
        visible = within_window(visible, window)
    return masked(q, k, v, visible=visible)


def masked(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor) -> list[Tensor]:
    """Attention by separate matmuls and softmax over the tokens that `visible` [B, T, S] marks."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(groups, dim=2).transpose(1, 2) for x in (k, v))
    scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(~visible[:, None], -torch.inf)
    return [(torch.softmax(scores, -1) @ v).transpose(1, 2)]


def fused(q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None, window: int | None) -> list[Tensor]:
    documents = UNPACKED if document_ids is None else find_documents(document_ids)
    return [causal_attention(q, k, v, documents=documents, window=window)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("heads", "groups", "width"), [(3, 3, 128), (8, 2, 64)])
@pytest.mark.parametrize("length", [63, 1000, 1337])
def test_values_and_gradients(length, heads, groups, width, window, documents, dtype):
    inputs = make_heads(2, length, heads, groups, width, dtype)
    options = {"document_ids": make_documents(documents, 2, length), "window": window}
    assert_as_good_as_the_reference(partial(fused, **options), partial(unfused, **options), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_sinks_outside_of_the_window(documents, dtype):
    inputs, ids = make_heads(2, 1337, 8, 2, 64, dtype), make_documents(documents, 2, 1337)
    known = UNPACKED if ids is None else find_documents(ids)
    visible = visible_near(torch.arange(1337, device="cuda"), 1337, ids, window=100, num_sinks=4)

    def ours(q, k, v):
        return [causal_attention(q, k, v, documents=known, window=100, num_sinks=4)]

    assert_as_good_as_the_reference(ours, partial(masked, visible=visible), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_two_way_attention(padded, documents, dtype):
    inputs, ids = make_heads(2, 1337, 4, 4, 64, dtype), make_documents(documents, 2, 1337)
    valid = (torch.arange(1337, device="cuda") % 1000 < 900).expand(2, -1) if padded else None
    visible = visible_in_documents(ids, valid, torch.arange(1337, device="cuda"))

    def ours(q, k, v):
        return [bidirectional_attention(q, k, v, visible=visible)]

    every = torch.ones(1, 1, 1, dtype=torch.bool, device="cuda") if visible is None else visible
    assert_as_good_as_the_reference(ours, partial(masked, visible=every), inputs)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "groups", "width"), [(3, 3, 128), (8, 2, 64)])
@pytest.mark.parametrize("length", [63, 1337])
def test_values_and_gradients_in_fp32(length, heads, groups, width, window, documents):
    inputs = make_heads(2, length, heads, groups, width, torch.float32)
    options = {"document_ids": make_documents(documents, 2, length), "window": window}
    exact = {name: x.double() for name, x in inputs.items()}
    truth = outputs_and_gradients(partial(unfused, **options), exact)
    assert_close(outputs_and_gradients(partial(fused, **options), inputs), truth, FP32_BOUND)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1])
def test_a_single_token_reads_its_own_value(window, dtype):
    """Gradients of queries and keys cancel, up to the rounding of their sums."""
    inputs = make_heads(2, 1, 8, 2, 64, dtype)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    (y,) = fused(**leaves, document_ids=None, window=window)
    q, k, v = inputs.values()
    values = v.repeat_interleave(4, dim=2)
    assert torch.equal(y, values)
    dy = torch.randn(y.shape, device="cuda").to(dtype)
    dq, dk, dv = torch.autograd.grad(y, list(leaves.values()), dy)
    found, expected = dv.double(), dy.double().unflatten(2, (2, 4)).sum(3)
    eps = torch.finfo(dtype).eps
    assert (found - expected).abs().max() <= 4 * eps * expected.abs().max()
    cancelled = (dy.double() * values.double()).abs().sum(-1).max() / 8
    assert dq.abs().max() <= 2 * eps * cancelled * k.abs().max()
    assert dk.abs().max() <= 8 * eps * cancelled * q.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1337, 700, 100], ids="last_{}_queries".format)
@pytest.mark.parametrize("documents", ["whole", "packed"])
def test_a_window_under_a_shared_key(documents, queries, dtype):
    inputs = make_heads(2, 1337, 4, 4, 64, dtype) | {"k": torch.randn(2, 1337, 64, device="cuda").to(dtype)}
    inputs["q"] = inputs["q"][:, -queries:].contiguous()
    ids = make_documents(documents, 2, 1337)
    known = UNPACKED if ids is None else find_documents(ids)

    def ours(q, k, v):
        return [window_attention(q, k, v, window=256, documents=known).output]

    def reference(q, k, v):
        every = torch.cat([torch.zeros_like(v[:, queries:]), q], dim=1)
        (y,) = unfused(every, k[:, :, None].expand_as(v), v, document_ids=ids, window=256)
        return [y[:, -queries:]]

    assert_as_good_as_the_reference(ours, reference, inputs)


@pytest.mark.parametrize("width", [36, 128, 200, 264])
@pytest.mark.parametrize("documents", ["whole", "packed"])
def test_widths_that_few_kernels_take(documents, width):
    inputs = make_heads(2, 300, 2, 1, width, torch.bfloat16)
    options = {"document_ids": make_documents(documents, 2, 300), "window": None}
    assert_as_good_as_the_reference(partial(fused, **options), partial(unfused, **options), inputs)


def test_half_precision_needs_no_mask():
    """Torch's own kernel passes its self-test here, so that no T x T tensor is allocated."""
    assert kernel_for("sdpa", True, "cuda", torch.bfloat16, 128) is None
    assert kernel_for("sdpa", False, "cuda", torch.bfloat16, 128) == "torch"
    inputs = make_heads(1, 32768, 1, 1, 64, torch.bfloat16)
    ids = (torch.arange(32768, device="cuda") // 1000)[None].int()
    known = find_documents(ids)
    kernel_for("auto", False, "cuda", torch.bfloat16, 64)  # its self-test allocates memory too
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    causal_attention(**inputs, documents=known)
    causal_attention(**inputs, window=1000)
    causal_attention(**inputs)
    assert torch.cuda.max_memory_allocated() - before < 32768**2 / 8


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"packed": True}])
def test_deterministic_algorithms_give_equal_bits(options):
    torch.use_deterministic_algorithms(True)
    inputs = make_heads(2, 4096, 4, 4, 128, torch.bfloat16)
    ids = make_documents("packed", 2, 4096) if options.get("packed") else None
    results = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        (y,) = fused(*leaves, document_ids=ids, window=options.get("window"))
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def losses_and_gradients(dtype: torch.dtype, document_ids: Tensor, *, compiled: bool) -> dict[str, Tensor]:
    attention = {"type": "softmax", "num_heads": 4, "num_key_value_heads": 2}
    window = {"type": "shared_key_attention", "num_heads": 4, "window": 37, "residual": "add"}
    config = model(
        {"sublayers": [attention, window, GLU], "repeat": 2}, hidden_size=256, init_std=0.02, embedding_scale=16.0
    )
    built = LanguageModel(config).to_empty(device=document_ids.device)
    init_weights(built, 0)
    built.to(dtype)
    for block in built.blocks if compiled else ():
        block.compile(fullgraph=True, dynamic=False)
    tokens = torch.randint(0, config.vocab_size, document_ids.shape, generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(document_ids.device)
    losses = built(tokens, labels=tokens, document_ids=document_ids).token_losses
    losses.sum().backward()
    return {"losses": losses.detach(), **{name: p.grad for name, p in built.named_parameters()}}


@pytest.mark.parametrize("documents", ["whole", "packed"])
def test_compiled_blocks_are_as_good_as_eager_ones(documents):
    """One graph, against fp64 with masks."""
    ids = make_documents(documents, 2, 200)
    ids = torch.zeros(2, 200, dtype=torch.int32, device="cuda") if ids is None else ids
    truth = losses_and_gradients(torch.float64, ids, compiled=False)
    eager, found = (
        errors(losses_and_gradients(torch.bfloat16, ids, compiled=compiled), truth) for compiled in (False, True)
    )
    assert not {name: (found[name], eager[name]) for name in truth if not found[name] <= 2 * eager[name]}
