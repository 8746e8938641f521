"""Attention by flash-attn, with a stand-in of its published signatures: when it is taken, and what it is given."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.model.language_model import LanguageModel
from megalin.ops import flash_attention as op
from megalin.ops.flash_attention import check_backend, document_offsets, flash_attention, uses_flash_attention
from megalin.ops.softmax_attention import softmax_attention_reference
from tests.cases import CASES, GLU, NAMES, build, make_inputs, model, weighted_loss
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.test_softmax_attention import documents_of
from tests.ops.test_softmax_attention import make_inputs as make_heads

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
    """[B, T, H, K] as published: grouped heads, and a mask only where asked."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return y.transpose(1, 2)


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
    """[tokens, H, K], sequences of at most the longest length from offset to offset, some of them empty."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    token = torch.arange(q.shape[0], dtype=torch.int32)
    sequence_q, sequence_k = (torch.searchsorted(o, token, right=True) for o in (cu_seqlens_q, cu_seqlens_k))
    seen = (sequence_q[:, None] == sequence_k) & ((token[:, None] >= token) | (not causal))
    seen = seen & (token[:, None] - token < max_seqlen_k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return y[0].transpose(0, 1)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The stand-in, installed; nothing decided yet."""
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(op, "_DEVICES", ("cpu",))
    monkeypatch.setattr(op, "_DTYPES", (torch.bfloat16, torch.float64))
    op.reason_against.cache_clear()
    yield module
    op.reason_against.cache_clear()


def chosen(dtype: torch.dtype = DTYPE, head_dim: int = HEAD, device: str = "cpu", backend: str = "auto") -> bool:
    check_backend(backend, device, dtype, head_dim, field="the.backend")
    return uses_flash_attention(backend, device, dtype, head_dim)


@pytest.mark.parametrize("heads", ["as many", "grouped", "one"])
@pytest.mark.parametrize("length", [1, 17, 64, 65])
@pytest.mark.usefixtures("package")
def test_packed_documents_and_whole_rows_equal_the_definition(length: int, heads: str):
    inputs, documents = make_heads(length, heads), documents_of(length)
    for ids, offsets in ((documents, document_offsets(documents)), (None, None)):
        actual = outputs_and_gradients(lambda offsets=offsets, **x: [flash_attention(**x, offsets=offsets)], inputs)
        expected = outputs_and_gradients(
            lambda ids=ids, **x: [softmax_attention_reference(document_ids=ids, **x)], inputs
        )
        assert_close(actual, expected, 1e-12)


def test_offsets_are_the_starts_of_documents_and_few_sizes():
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 3]], dtype=torch.int32)
    offsets = document_offsets(ids)
    assert offsets.tolist() == [0, 2, 5, 6, 7, 9, *[10] * 11]
    assert offsets.dtype == torch.int32
    assert document_offsets(ids[:1]).tolist() == [0, 2, 5, 5, 5]
    assert document_offsets(torch.zeros(1, 3)).tolist() == [0, 3]
    assert {len(document_offsets(torch.arange(n)[None])) for n in range(1, 257)} == {2, 5, 17, 65, 257}


@pytest.mark.usefixtures("package")
def test_auto_takes_the_package_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger=op.__name__):
        assert [chosen(), chosen(backend="flash_attn"), chosen(), chosen(backend="sdpa")] == [True, True, True, False]
    assert [record.message for record in caplog.records] == [
        "softmax attention, torch.bfloat16 heads of 16 on cpu: flash_attn"
    ]


def wrong_mask(q, k, v, cu_seqlens_q, *others, causal, deterministic):
    whole = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    return flash_attn_varlen_func(q, k, v, whole, whole, q.shape[0], q.shape[0], causal=causal)


def not_causal(q, k, v, causal, deterministic):
    return flash_attn_func(q, k, v)


def lost_gradient(q, k, v, causal, deterministic):
    return flash_attn_func(q, k.detach() * 0.5 + k * 0.5, v, causal=causal)


def no_kernel(q, k, v, causal, deterministic):
    raise RuntimeError("no kernel image is available\nfor this device")


def not_a_number(q, k, v, causal, deterministic):
    return flash_attn_func(q, k, v, causal=causal) * float("nan")


REASONS = {
    "device": ({"device": "meta"}, {}, r"the tensors are on meta, and it needs cpu"),
    "dtype": ({"dtype": torch.float32}, {}, r"the tensors are torch\.float32, and it needs bfloat16 or float16"),
    "width": ({"head_dim": 264}, {}, "heads are 264 wide, and it takes at most 256"),
    "mask": ({}, {"flash_attn_varlen_func": wrong_mask}, r"its values differ from torch's by .* \(packed\)"),
    "causal": ({}, {"flash_attn_func": not_causal}, r"its values differ .* \(one document a row\)"),
    "gradient": ({}, {"flash_attn_func": lost_gradient}, r"its dk differ from torch's by 5\..e-01"),
    "nan": ({}, {"flash_attn_func": not_a_number}, "its values differ from torch's by nan"),
    "kernel": ({}, {"flash_attn_func": no_kernel}, r"flash-attn fails: no kernel image is available"),
    "build": ({}, {"flash_attn_varlen_func": None}, "flash-attn fails: cannot import name 'flash_attn_varlen_func'"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_run_is_passed_over_and_refused_where_asked_for(package, caplog, name: str):
    arguments, changes, reason = REASONS[name]
    for function, replacement in changes.items():
        if replacement is None:
            delattr(package, function)
        else:
            setattr(package, function, replacement)
    with caplog.at_level(logging.INFO, logger=op.__name__):
        assert not chosen(**arguments)
    assert ": sdpa (" in caplog.text
    with pytest.raises(ConfigError, match=rf'the\.backend = "flash_attn" cannot run: {reason}.*; use "auto" or "sdpa"'):
        chosen(**arguments, backend="flash_attn")


def test_without_the_package_it_is_refused_only_where_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(op, "_DEVICES", ("cpu",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    op.reason_against.cache_clear()
    assert not chosen()
    with pytest.raises(ConfigError, match="cannot run: the package flash-attn is not installed"):
        chosen(backend="flash_attn")
    op.reason_against.cache_clear()


def outcome(built: LanguageModel) -> dict[str, Tensor]:
    inputs = make_inputs()
    output = built(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    weighted_loss(output.token_losses).backward()
    return {"losses": output.token_losses, **{name: p.grad for name, p in built.named_parameters()}}


@pytest.mark.parametrize("name", ["softmax", "softmax-grouped"])
def test_the_model_has_the_same_losses_and_gradients(package, monkeypatch, name: str):
    calls = []
    for function in (flash_attn_func, flash_attn_varlen_func):
        recorded = lambda *args, function=function, **fields: (calls.append(function), function(*args, **fields))[1]  # noqa: E731
        monkeypatch.setattr(package, function.__name__, recorded)
    config = CASES[NAMES.index(name)].model
    outcome(build(config))  # decides
    calls.clear()
    found = outcome(build(config))
    assert calls == [flash_attn_varlen_func] * 2
    calls.clear()
    sdpa = [block.model_copy(update={"sublayers": sdpa_sublayers(block)}) for block in config.layers]
    assert_close(found, outcome(build(config.model_copy(update={"layers": sdpa}))), 1e-12)
    whole, tokens = build(config), make_inputs().tokens
    assert calls == []
    whole(tokens)
    assert calls == [flash_attn_func] * 2
    state = whole(tokens, state=whole.initial_state(4, dtype=torch.float64)).state
    whole.step(tokens[:, 0], state)
    assert len(calls) == 2


def sdpa_sublayers(block):
    return [s.model_copy(update={"backend": "sdpa"}) if s.type == "softmax" else s for s in block.sublayers]


@pytest.mark.usefixtures("package")
def test_a_compiled_block_takes_the_package_too():
    """As one graph, with document ids and without."""
    config, tokens = CASES[NAMES.index("softmax-grouped")].model, make_inputs().tokens
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
        match=r'layers\.0\.sublayers\.0\.backend = "flash_attn" cannot run: the tensors are on cpu, and it needs cuda',
    ):
        built(make_inputs().tokens)
    with torch.no_grad():
        state = built(make_inputs().tokens, state=built.initial_state(4, dtype=torch.float64)).state
    assert built.step(make_inputs().tokens[:, 0], state).logits.isfinite().any()
