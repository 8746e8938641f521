"""AdamW on a CPU that updates an element with the same bits in whatever shard it lies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalin.optim.adamw import build_optimizer, step_or_skip
from megalin.optim.config import OptimizerConfig

ELEMENTS, STEPS = 16_384, 3


def updated(length: int, *, skip_step: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """The weights and both moments after some steps, of weights in shards of `length`."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(torch.randn(ELEMENTS, generator=generator).split(length))
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01), (), same_on_any_shard=True)
    for step in range(STEPS):
        for shard, gradient in zip(model, torch.randn(ELEMENTS, generator=generator).split(length), strict=True):
            shard.grad = gradient.clone()
        step_or_skip(torch.tensor(True), optimizer, skip=torch.tensor(step == skip_step))
    states = [optimizer.state[shard] for shard in model]
    assert {int(state["step"]) for state in states} == {STEPS - (skip_step >= 0)}
    assert all(shard.numel() == state["exp_avg"].numel() for shard, state in zip(model, states, strict=True))
    return (
        torch.cat([shard.detach() for shard in model]),
        torch.cat([state["exp_avg"] for state in states]),
        torch.cat([state["exp_avg_sq"] for state in states]),
    )


def test_shards_of_any_length_have_the_bits_of_the_whole():
    """Torch's fused update alone rounds some elements of the rest after the last whole vector differently."""
    whole = updated(ELEMENTS)
    for length in (5, 15, 77):
        for expected, found in zip(whole, updated(length), strict=True):
            assert torch.equal(expected, found), length


def test_a_skipped_step_changes_no_shard_with_a_rest():
    for expected, found in zip(updated(ELEMENTS, skip_step=1), updated(77, skip_step=1), strict=True):
        assert torch.equal(expected, found)
    assert not torch.equal(updated(77, skip_step=1)[0], updated(77)[0])
