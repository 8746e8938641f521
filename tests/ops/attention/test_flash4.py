"""flash-attn-4: its choice, arguments and results, with a stand-in that has the signature that PyTorch's hook calls."""

from __future__ import annotations

import logging
import types

import pytest
import torch

from megalin.errors import ConfigError
from megalin.ops.attention import causal as choice
from megalin.ops.attention import flash as op
from megalin.ops.attention import flash4
from megalin.ops.attention.causal import causal_attention
from megalin.ops.attention.flash import unavailable_reason
from tests.cases import GLU, build, make_inputs, model
from tests.numerics import assert_close
from tests.ops.attention.test_flash import (
    DTYPE,
    HEAD,
    attend,
    attend_backward,
    chosen,
    clear_choices,
    outcome,
    package,
    with_backend,
)
from tests.ops.attention.test_flash import (
    test_packed_documents_and_unpacked_sequences_equal_the_definition as assert_equal_the_definition,
)
from tests.ops.attention.test_flash import test_windows_are_those_of_the_mask as assert_windows_of_the_mask

__all__ = ["package"]


def four_forward(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    causal=False,
    window_size_left=None,
    window_size_right=None,
    return_lse=False,
):
    """Stand-in for flash-attn-4's forward: windows are left and right numbers of tokens, without `causal`."""
    assert causal == (window_size_right is None)
    assert (window_size_left is None) == causal
    assert return_lse
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k
    return *attend(q, k, v, cu_seqlens_q, max_seqlen_q, 0 if causal else window_size_left + 1), None, None, None


def four_backward(q, k, v, out, dout, lse, deterministic=False, **options):
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    window = 0 if options["causal"] else options["window_size_left"] + 1
    starts, longest = options["cu_seqlens_q"], options["max_seqlen_q"]
    return *attend_backward(dout, q, k, v, out, lse, starts, longest, window), None


@pytest.fixture
def package_four(package, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Installs the stand-ins for flash-attn-4, too, on a GPU that it was measured on."""
    interface = types.SimpleNamespace(_flash_attn_fwd=four_forward, _flash_attn_bwd=four_backward)
    monkeypatch.setattr(op, "is_installed", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash4, "_interface", lambda: interface)
    return interface


@pytest.mark.parametrize("heads", ["as many", "grouped", "one"])
@pytest.mark.parametrize("length", [1, 17, 65])
@pytest.mark.usefixtures("package_four")
def test_packed_documents_and_unpacked_sequences_equal_the_definition(length: int, heads: str):
    assert_equal_the_definition(length, heads, "flash_attn_4")


@pytest.mark.parametrize("window", [1, 16, 65])
@pytest.mark.usefixtures("package_four")
def test_windows_are_those_of_the_mask(window: int):
    assert_windows_of_the_mask(window, "flash_attn_4")


@pytest.mark.usefixtures("package_four")
def test_its_backward_adds_in_any_order_unless_one_is_asked_for():
    """The stand-in compares the argument with the mode, which the tests switch on."""
    torch.use_deterministic_algorithms(False)
    assert_equal_the_definition(17, "grouped", "flash_attn_4")


@pytest.mark.usefixtures("package_four")
@pytest.mark.parametrize(
    ("capability", "found", "reason"),
    [
        ((9, 0), ["flash_attn_4", "flash_attn_4", "flash_attn_4"], ""),
        ((10, 0), ["torch", None, "flash_attn_4"], "was measured on compute capability 9.0 alone, not on 10.0"),
        ((8, 9), ["torch", None], "was measured on compute capability 9.0 alone, not on 8.9"),
    ],
)
def test_flash_attn_4_is_taken_where_it_was_measured_or_is_asked_for(monkeypatch, caplog, capability, found, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        assert [chosen(), chosen(unpacked=True)] == found[:2]
    assert reason in caplog.text
    if len(found) == 2:
        with pytest.raises(ConfigError, match=r'"flash_attn_4" cannot run: compute capability 8.9 is below 9.0; use'):
            chosen(backend="flash_attn_4")
    else:
        assert chosen(backend="flash_attn_4", unpacked=True) == found[2]


@pytest.mark.usefixtures("package_four")
def test_flash_attn_4_is_left_out_for_short_sequences_of_one_document(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        assert [chosen(unpacked=whole, is_short=True) for whole in (True, False)] == [None, "flash_attn_4"]
    assert "sdpa; not flash_attn_4: sequences of less than 8,192 tokens" in caplog.text
    assert chosen(unpacked=True, is_short=True, backend="flash_attn_4") == "flash_attn_4"
    kernels = []
    monkeypatch.setattr(choice, "flash_attention", lambda q, k, v, *, kernel, **_: (kernels.append(kernel), q)[1])
    for length in (8191, 8192):
        causal_attention(*(torch.zeros(1, length, 1, HEAD, dtype=DTYPE) for _ in "qkv"))
    assert kernels == ["flash_attn_4"]


def test_flash_attn_4_is_tested_with_the_group_of_the_call_and_on_any_error_torch_stays(package_four, monkeypatch):
    def wrong_groups(q, k, *others, **options):
        dq, dk, dv, _ = four_backward(q, k, *others, **options)
        return dq, dk * (1 if q.shape[1] < 3 * k.shape[1] else 0.9), dv

    package_four._flash_attn_bwd = wrong_groups
    reasons = [unavailable_reason("flash_attn_4", "cpu", DTYPE, HEAD, group) for group in (1, 2, 3)]
    assert reasons[:2] == ["", ""]
    assert "its dk differ from torch's by 1.0e-01" in reasons[2]
    clear_choices()
    package_four._flash_attn_bwd = lambda q, k, v, out, dout, lse: None  # another version
    assert chosen() == "torch"
    assert "it fails: " in unavailable_reason("flash_attn_4", "cpu", DTYPE, HEAD)


@pytest.mark.parametrize("groups", [2, 6])
def test_the_model_attends_by_flash_attn_4_in_packed_and_whole_sequences(package_four, monkeypatch, groups: int):
    monkeypatch.setattr(flash4, "LONG", make_inputs().tokens.shape[1])
    attention = {"type": "softmax", "num_heads": 6, "num_key_value_heads": groups}
    config, tokens = model({"sublayers": [attention, GLU], "repeat": 2}), make_inputs().tokens
    losses, logits = outcome(build(with_backend(config, "sdpa"))), build(with_backend(config, "sdpa"))(tokens).logits
    build(config)(tokens)  # makes the choices
    outcome(build(config))
    calls = []
    package_four._flash_attn_fwd = lambda *heads, **options: (calls.append(heads), four_forward(*heads, **options))[1]
    assert_close(outcome(build(config)), losses, 1e-12)
    assert len(calls) == 2
    torch.testing.assert_close(build(config)(tokens).logits, logits, rtol=1e-12, atol=1e-12)
    assert len(calls) == 4


@pytest.mark.usefixtures("package_four")
def test_a_compiled_block_takes_flash_attn_4(monkeypatch):
    monkeypatch.setattr(flash4, "LONG", make_inputs().tokens.shape[1])
    attention = {"type": "softmax", "num_heads": 6, "num_key_value_heads": 2}
    config, tokens = model({"sublayers": [attention, GLU], "repeat": 2}), make_inputs().tokens
    assert chosen(torch.float64, 8) == chosen(torch.float64, 8, unpacked=True) == "flash_attn_4"
    expected, compiled, whole = outcome(build(config)), build(config), build(config)(tokens).logits
    for block in compiled.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens).logits, whole, rtol=1e-12, atol=1e-12)
    assert_close(outcome(compiled), expected, 1e-12)
