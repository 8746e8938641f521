"""Choice of flash attention kernels and their arguments, with stand-ins that have the published signatures."""

from __future__ import annotations

import logging
import re
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.model.language_model import LanguageModel
from megalin.ops.attention import causal as choice
from megalin.ops.attention import flash as op
from megalin.ops.attention import window as windows
from megalin.ops.attention.causal import causal_attention, check_backend, kernel_for
from megalin.ops.attention.flash import FlashKernel, flash_attention, unavailable_reason
from megalin.ops.attention.softmax import (
    softmax_attention,
    softmax_attention_reference,
    visible_tokens,
    within_window,
)
from megalin.ops.choices import AttentionBackend
from megalin.ops.documents import UNPACKED, find_documents
from megalin.parallel.config import ParallelConfig
from megalin.verify import run as verify_run
from megalin.verify.case import Case, make_case
from megalin.verify.comparison import TensorError
from tests.cases import CASES, GLU, NAMES, SHARED_KEY, build, make_inputs, model, weighted_loss
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.attention.test_softmax import documents_of
from tests.ops.attention.test_softmax import make_inputs as make_heads
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

DTYPE, HEAD = torch.bfloat16, 16


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Stand-in on [B, T, H, K] as published: grouped heads, and a mask only if `causal`."""
    length = q.shape[1]
    starts = torch.arange(0, q.shape[0] * length + 1, length, dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    y = flash_attn_varlen_func(*flat, starts, starts, length, length, causal=causal, window_size=window_size)
    return y.unflatten(0, q.shape[:2])


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Stand-in on [tokens, H, K]: sequences between the offsets, some empty, none above the longest length."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    token = torch.arange(q.shape[0], dtype=torch.int32)
    sequence_q, sequence_k = (torch.searchsorted(o, token, right=True) for o in (cu_seqlens_q, cu_seqlens_k))
    visible = (sequence_q[:, None] == sequence_k) & ((token[:, None] >= token) | (not causal))
    visible = visible & (token[:, None] - token < max_seqlen_k)
    if window_size[0] >= 0:
        visible = visible & (token[:, None] - token <= window_size[0])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=softmax_scale, enable_gqa=True)
    return y[0].transpose(0, 1)


def attend(q, k, v, starts, longest, window):
    """Stand-in for torch's kernel, without the softmax sums that its backward reads."""
    assert int(starts.diff().min()) > 0
    assert int(starts.diff().max()) == longest
    sizes = (starts, starts, longest, longest)
    y = flash_attn_varlen_func(q, k, v, *sizes, causal=True, window_size=(window - 1, 0))
    return y.clone(), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)


def attend_backward(dy, q, k, v, output, sums, starts, longest, window):
    """Stand-in for the backward, written by hand: autograd does not record inside an op."""
    torch.testing.assert_close(output, attend(q, k, v, starts, longest, window)[0])
    groups, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    token = torch.arange(len(q), dtype=torch.int32)
    sequence = torch.searchsorted(starts, token, right=True)
    visible = (sequence[:, None] == sequence) & (token[:, None] >= token)
    if window:
        visible = visible & (token[:, None] - token < window)
    dy, q, *wide = (x.transpose(0, 1) for x in (dy, q, *(x.repeat_interleave(groups, 1) for x in (k, v))))
    scores = (q @ wide[0].mT * scale).masked_fill(~visible, -torch.inf).softmax(-1)  # [H, N, N]
    weights = dy @ wide[1].mT
    weights = scores * (weights - (weights * scores).sum(-1, keepdim=True)) * scale
    shared = [x.unflatten(0, (-1, groups)).sum(1) for x in (weights.mT @ q, scores.mT @ dy)]
    return tuple(x.transpose(0, 1).contiguous() for x in (weights @ wide[0], *shared))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Installs the stand-ins for torch's kernel and flash-attn, and clears the cached choices of a kernel."""
    module = types.ModuleType("flash_attn")
    monkeypatch.setattr(op, "is_installed", lambda name: name == "flash-attn")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(op, "_attend", attend)
    monkeypatch.setattr(op, "_attend_backward", attend_backward)
    monkeypatch.setattr(op, "_DEVICES", ("cpu",))
    monkeypatch.setattr(op, "_DTYPES", (torch.bfloat16, torch.float64))
    clear_choices()
    yield module
    clear_choices()


def clear_choices() -> None:
    op.unavailable_reason.cache_clear()
    choice._decide.cache_clear()


def chosen(dtype=DTYPE, head_dim=HEAD, device="cpu", *, backend="auto", unpacked=False, is_short=False):
    check_backend(backend, device, dtype, head_dim, field="the.backend")
    return kernel_for(backend, unpacked, device, dtype, head_dim, 1, is_short)


@pytest.mark.parametrize("kernel", ["flash_attn", "torch"])
@pytest.mark.parametrize("heads", ["as many", "grouped", "one"])
@pytest.mark.parametrize("length", [1, 17, 64, 65])
@pytest.mark.usefixtures("package")
def test_packed_documents_and_unpacked_sequences_equal_the_definition(length: int, heads: str, kernel: FlashKernel):
    inputs, documents = make_heads(length, heads), documents_of(length)
    for ids in (documents, None):
        documents = UNPACKED if ids is None or length == 1 else find_documents(ids)
        actual = outputs_and_gradients(
            lambda documents=documents, **x: [flash_attention(**x, documents=documents, kernel=kernel)], inputs
        )
        expected = outputs_and_gradients(
            lambda ids=ids, **x: [softmax_attention_reference(document_ids=ids, **x)], inputs
        )
        assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("kernel", ["flash_attn", "torch"])
@pytest.mark.parametrize("window", [1, 16, 65])
@pytest.mark.usefixtures("package")
def test_windows_are_those_of_the_mask(window: int, kernel: FlashKernel):
    inputs, ids = make_heads(65), documents_of(65)
    for documents, visible in ((find_documents(ids), visible_tokens(ids)), (UNPACKED, visible_tokens(ids[:1] * 0))):
        actual = flash_attention(**inputs, documents=documents, window=window, kernel=kernel)
        expected = softmax_attention(**inputs, visible=within_window(visible, window))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["flash_attn", "auto"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.usefixtures("package")
def test_queries_of_the_last_tokens_alone(
    window: int | None, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
):
    """The kernel runs without a mask over all tokens."""
    inputs, ids = make_heads(65), documents_of(65)
    assert chosen(torch.float64, inputs["q"].shape[3], backend="flash_attn") == "flash_attn"
    for documents in (find_documents(ids), UNPACKED):

        def last(q, k, v, documents=documents):
            return [causal_attention(q[:, 40:], k, v, documents=documents, window=window, backend=backend)]

        def every(q, k, v, documents=documents):
            return [causal_attention(q, k, v, documents=documents, window=window, backend=backend)[:, 40:]]

        if documents is not UNPACKED or window is not None or backend == "flash_attn":
            with monkeypatch.context() as patch:
                patch.setattr(choice, "visible_near", None)
                assert last(**inputs)[0].shape == inputs["q"][:, 40:].shape
        assert_close(outputs_and_gradients(last, inputs), outputs_and_gradients(every, inputs), 1e-12)


def agree_without_masks(cases: list[Case]) -> list[TensorError]:
    """Mismatches between this rank and one process when every window is computed by the stand-ins."""
    op._attend, op._attend_backward = attend, attend_backward
    op._DEVICES, op._DTYPES = ("cpu",), (torch.float64,)
    choice.visible_near = windows.softmax_attention = None
    verify_run.compare_decoding = lambda *_: []  # decoding reads its cache without a kernel
    return [row for rows in verify_all(cases) for row in rows if not row.passed]


@pytest.mark.parametrize("window", [7, 40])
def test_windows_over_ranks_take_the_kernel(window: int):
    """A window that ends on the previous rank, and one that spans several ranks."""
    sublayers = [SHARED_KEY | {"window": window, "num_heads": 6}, GLU]
    cases = [
        make_case(
            model({"sublayers": sublayers, "repeat": 2}),
            ParallelConfig(cp=3),
            data_size=1,
            dtype="float64",
            full=True,
            length=48,
            recompute=recompute,
        )
        for recompute in (False, True)
    ]
    assert run_ranks(3, agree_without_masks, cases) == [[]] * 3


def test_the_self_test_runs_without_the_hooks_of_a_block_that_recomputes():
    def recompute(_: Tensor) -> Tensor:
        raise AssertionError("the caller's hook was called")

    q = torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, recompute):
        found = op._output_and_gradients(softmax_attention, (q, q, q), q)
    assert len(found) == 4


@pytest.mark.usefixtures("package")
def test_each_choice_is_logged_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        found = [chosen(), chosen(), chosen(backend="flash_attn"), chosen(backend="sdpa")]
        found += [chosen(backend=backend, unpacked=True) for backend in ("auto", "flash_attn", "sdpa")]
    assert found == ["torch", "torch", "flash_attn", "torch", None, "flash_attn", None]
    packed, whole = (
        f"softmax attention of {rows}, torch.bfloat16 heads of 16 on cpu: "
        for rows in ("packed rows or windows", "whole rows")
    )
    four = "; not flash_attn_4: the package flash-attn-4 is not installed"
    assert [record.message for record in caplog.records] == [
        *(packed + kernel for kernel in ("torch" + four, "flash_attn", "torch")),
        *(whole + kernel for kernel in ("sdpa" + four, "flash_attn", "sdpa")),
    ]


def wrong_mask(q, k, v, cu_seqlens_q, *others, **fields):
    whole = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    return flash_attn_varlen_func(q, k, v, whole, whole, q.shape[0], q.shape[0], causal=True)


def wrong_window(q, k, v, *sizes, window_size, **fields):
    wider = (window_size[0] + 1, 0) if window_size[0] >= 0 else window_size
    return flash_attn_varlen_func(q, k, v, *sizes, causal=True, window_size=wider)


def not_causal(q, k, v, **fields):
    return flash_attn_func(q, k, v)


def lost_gradient(q, k, v, **fields):
    return flash_attn_func(q, k.detach() * 0.5 + k * 0.5, v, causal=True)


def no_kernel(q, k, v, **fields):
    raise RuntimeError("no kernel image is available\nfor this device")


def not_a_number(q, k, v, **fields):
    return flash_attn_func(q, k, v, causal=True) * float("nan")


REASONS = {
    "device": ({"device": "meta"}, {}, r"the tensors are on meta, but it needs cpu"),
    "dtype": ({"dtype": torch.float32}, {}, r"the tensors are torch\.float32, but it needs bfloat16 or float16"),
    "width": ({"head_dim": 264}, {}, "head dimension 264 is above its limit of 256"),
    "mask": ({}, {"flash_attn_varlen_func": wrong_mask}, r"its values differ from torch's by .* \(packed\)"),
    "window": ({}, {"flash_attn_varlen_func": wrong_window}, r"its values differ from torch's by .* \(a window\)"),
    "causal": ({}, {"flash_attn_func": not_causal}, r"its values differ .* \(one document per sequence\)"),
    "gradient": ({}, {"flash_attn_func": lost_gradient}, r"its dk differ from torch's by 5\..e-01"),
    "nan": ({}, {"flash_attn_func": not_a_number}, "its values differ from torch's by nan"),
    "kernel": ({}, {"flash_attn_func": no_kernel}, r"it fails: no kernel image is available"),
    "build": ({}, {"flash_attn_varlen_func": None}, "it fails: cannot import name 'flash_attn_varlen_func'"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_run_is_passed_over_and_refused_where_asked_for(package, caplog, name: str):
    arguments, changes, reason = REASONS[name]
    kind = (arguments.get("device", "cpu"), arguments.get("dtype", DTYPE), arguments.get("head_dim", HEAD))
    for function, replacement in changes.items():
        if replacement is None:
            delattr(package, function)
        else:
            setattr(package, function, replacement)
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        assert kernel_for("flash_attn", False, *kind) is None
    assert re.search(f": sdpa; not flash_attn: {reason}", caplog.text)
    with pytest.raises(ConfigError, match=rf'the\.backend = "flash_attn" cannot run: {reason}.*; use "auto" or "sdpa"'):
        chosen(**arguments, backend="flash_attn")


def test_torchs_kernel_takes_what_it_can_and_the_package_the_rest(package, monkeypatch: pytest.MonkeyPatch):
    assert unavailable_reason("torch", "cpu", DTYPE, 12) == "head dimension 12 is not a multiple of 8"
    assert [chosen(head_dim=12), chosen(head_dim=12, backend="sdpa")] == ["flash_attn", None]
    clear_choices()
    monkeypatch.setattr(op, "_attend", lambda *_: (_ for _ in ()).throw(RuntimeError("no kernel image")))
    assert unavailable_reason("torch", "cpu", DTYPE, 16) == "it fails: no kernel image"
    assert [chosen(), chosen(backend="sdpa")] == ["flash_attn", None]


@pytest.mark.usefixtures("package")
def test_without_the_package_it_is_refused_only_where_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(op, "is_installed", lambda name: False)
    assert chosen() == "torch"
    with pytest.raises(ConfigError, match="cannot run: the package flash-attn is not installed"):
        chosen(backend="flash_attn")


def outcome(built: LanguageModel) -> dict[str, Tensor]:
    inputs = make_inputs()
    output = built(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    weighted_loss(output.token_losses).backward()
    return {"losses": output.token_losses, **{name: p.grad for name, p in built.named_parameters()}}


def with_backend(config, backend: str):
    """The same model with `backend` for softmax attention."""

    def changed(block):
        return [s.model_copy(update={"backend": backend}) if s.type == "softmax" else s for s in block.sublayers]

    return config.model_copy(
        update={"layers": [block.model_copy(update={"sublayers": changed(block)}) for block in config.layers]}
    )


@pytest.mark.parametrize("name", ["softmax", "softmax-grouped"])
def test_the_model_has_the_same_losses_and_gradients(package, monkeypatch, name: str):
    """Packed samples call the varlen kernel once a layer; single documents, and calls with a state, do not."""
    calls = []
    for function in (flash_attn_func, flash_attn_varlen_func):
        recorded = lambda *args, function=function, **fields: (calls.append(function), function(*args, **fields))[1]  # noqa: E731
        monkeypatch.setattr(package, function.__name__, recorded)
    config, tokens = CASES[NAMES.index(name)].model, make_inputs().tokens
    outcome(build(config))  # makes the choice
    calls.clear()
    found = outcome(build(config))
    assert calls == [flash_attn_varlen_func] * 2
    calls.clear()
    assert_close(found, outcome(build(with_backend(config, "sdpa"))), 1e-12)
    built = build(config)
    expected = built(tokens).logits
    assert torch.equal(built(tokens, document_ids=torch.full_like(tokens, 3)).logits, expected)
    state = built(tokens, state=built.initial_state(4, dtype=torch.float64)).state
    built.step(tokens[:, 0], state)
    assert calls == []
    explicit = build(with_backend(config, "flash_attn"))(tokens).logits
    assert calls == [flash_attn_func] * 2
    torch.testing.assert_close(explicit, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_heads", "kernel"), [(6, "torch"), (12, "flash_attn")])
@pytest.mark.usefixtures("package")
def test_a_compiled_block_takes_the_kernel_too(num_heads: int, kernel: str):
    """As one graph, with document ids and without."""
    attention = {"type": "softmax", "num_heads": num_heads, "num_key_value_heads": 2}
    config, tokens = model({"sublayers": [attention, GLU], "repeat": 2}), make_inputs().tokens
    assert kernel_for("auto", False, "cpu", torch.float64, 48 // num_heads) == kernel
    expected, compiled = outcome(build(config)), build(config)
    whole = build(config)(tokens).logits
    for block in compiled.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens).logits, whole, rtol=1e-12, atol=1e-12)
    assert_close(outcome(compiled), expected, 1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_training_without_the_explicit_backend_is_refused_and_decoding_is_not(compiled: bool):
    built = build(model({"sublayers": [{"type": "softmax", "num_heads": 12, "backend": "flash_attn"}, GLU]}))
    if compiled:
        built.blocks[0].compile(fullgraph=True, dynamic=False, backend="aot_eager")
    with pytest.raises(
        ConfigError,
        match=r'layers\.0\.sublayers\.0\.backend = "flash_attn" cannot run: the tensors are on cpu, but it needs cuda',
    ):
        built(make_inputs().tokens)
    with torch.no_grad():
        state = built(make_inputs().tokens, state=built.initial_state(4, dtype=torch.float64)).state
    assert built.step(make_inputs().tokens[:, 0], state).logits.isfinite().any()
