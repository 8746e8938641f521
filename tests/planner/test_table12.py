"""Claims of docs/planner.md on the paper's Table 12: the assumptions that reproduce its memory, and the needed ones."""

import inspect

import pytest
import torch
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from tests.planner.table12 import (
    BATCH,
    GIB,
    INNER,
    LENGTH,
    OTHERWISE,
    PAPER,
    TRANSFORMER,
    WIDTH,
    System,
    errors,
    gib,
    layer_cost,
    units,
    within,
)

HIDDEN_BYTES = BATCH * LENGTH * WIDTH * 2
"""Bytes of bf16 hidden states."""


def test_all_four_figures_are_within_two_per_cent():
    assert errors(gib(System()), PAPER) == pytest.approx([0.0] * 4, abs=0.02)


def test_all_combinations_within_ten_per_cent_agree_on_the_needed_assumptions():
    near = within(0.1)
    assert (System(), GIB) in near
    assert len(near) == 12
    for system, _ in near:
        assert system.autocast
        assert system.reshard
        assert system.wrap_elements == 10**8
        assert system.lrpe != "first"
        assert not system.recompute
        assert not system.batch_per_gpu


@pytest.mark.parametrize(
    ("otherwise", "largest"),
    [
        ("the sharded data parallelism casts to bf16", 0.363),
        ("weights stay gathered after the forward", 0.394),
        ("each layer is a unit", 0.174),
        ("LRPE in the first layer only", 0.230),
        ("layers recomputed", 0.754),
        ("batch 2 a GPU", 3.592),
    ],
)
def test_another_choice_alone_misses_a_figure(otherwise, largest):
    found = max(map(abs, errors(gib(OTHERWISE[otherwise]), PAPER)))
    assert found == pytest.approx(largest, abs=0.01)


def test_layers_that_are_no_units_cost_at_model_parallel_4_only():
    extra = [with_all - alone for with_all, alone in zip(gib(System()), gib(System(wrap_elements=0)), strict=True)]
    assert extra == pytest.approx([0.0, 0.0, 6.1, 0.0], abs=0.1)


def test_the_transformer_of_the_paper_is_not_reproduced():
    found = errors(gib(System(), "llama-7b"), TRANSFORMER)
    assert all(-0.3 < error < -0.1 for error in found)


def test_layers_are_units_by_the_default_of_pytorchs_policy():
    default = inspect.signature(size_based_auto_wrap_policy).parameters["min_num_params"].default
    sizes = [units("transnormerllm-7b", tp).blocks[0].whole for tp in PAPER]
    assert System().wrap_elements == default
    assert [size >= default for size in sizes] == [True, True, False, False]


@pytest.mark.parametrize("tp", PAPER)
def test_a_layer_under_autocast_keeps_what_a_count_by_hand_says(tp):
    kept = layer_cost("transnormerllm-7b", tp, torch.float32, BATCH, None, False).saved_bytes
    # fp32 inputs of two norms, and a bf16 copy of their results for each of the three matmuls that read them.
    replicated = 2 * 2 + 3
    # The fused projections; q, k and v as the kernel reads them; its output, normed and gated; the GLU's three tensors.
    sharded = 4 + 3 + 3 + 3 * INNER / WIDTH
    weights = 2 * (5 * WIDTH**2 + 3 * WIDTH * INNER) // tp
    norms = 3 * BATCH * LENGTH * 4
    assert kept == pytest.approx(HIDDEN_BYTES * (replicated + sharded / tp) + weights + norms, rel=1e-6)


@pytest.mark.parametrize("tp", PAPER)
def test_lrpe_keeps_its_angles_and_wider_queries(tp):
    plain, with_lrpe = (
        layer_cost("transnormerllm-7b", tp, torch.float32, BATCH, lrpe, False).saved_bytes for lrpe in (None, "cosine")
    )
    angles = LENGTH * WIDTH * 4
    # For q and for k: silu's result, angle, cosine and sine, and twice as many channels, in fp32 instead of bf16.
    each = HIDDEN_BYTES + 3 * angles + (4 - 1) * HIDDEN_BYTES
    # Two calls read v; the output, its norm and its gated form are fp32 if the kernel's result is.
    rest = HIDDEN_BYTES + 2 * HIDDEN_BYTES
    assert with_lrpe - plain == pytest.approx((2 * each + rest) / tp, rel=1e-3)
