"""Clipping and AdamW on tensor-parallel, sharded and replicated parameters against one process, in fp64."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megalin.optim.adamw import build_optimizer, set_learning_rate
from megalin.optim.clipping import clip_gradients
from megalin.optim.config import OptimizerConfig, ScheduleConfig
from megalin.optim.schedule import learning_rate
from megalin.parallel.heartbeats import Heartbeat
from tests.ranks import run_ranks

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.5, max_grad_norm=0.25)
SCHEDULE = ScheduleConfig(warmup_steps=1, min_lr_ratio=0.1)
NO_DECAY = {"norm"}
STEPS = 3
NUM_BATCHES = 12
# Column-parallel, row-parallel and replicated weights; the norm's three elements give data ranks unequal shards.
PLACEMENTS = {"column": Shard(0), "row": Shard(1), "norm": Replicate()}
SHAPES = {"column": (12, 4), "row": (4, 8), "norm": (3,)}


class Quadratic(nn.Module):
    """Half the squared distance of each weight from a target; its gradient is that distance."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        for name, value in _draw(seed=0).items():
            self.register_parameter(name, nn.Parameter(self._place(name, value)))

    def _place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value if self.mesh is None else distribute_tensor(value, self.mesh["tp"], [PLACEMENTS[name]])

    def forward(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, target in targets.items():
            weight, target = getattr(self, name), self._place(name, target)
            total = total + (0.5 * (_local(weight) - _local(target)) ** 2).sum()
        return total


def _draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _train(model: Quadratic, batches: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms before clipping by step, and weights and gradients after the last step, for this rank's batches."""
    optimizer = build_optimizer(model, CONFIG, NO_DECAY)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches:
            model(_draw(seed=1 + NUM_BATCHES * step + batch)).backward()
        norm = clip_gradients(model.parameters(), CONFIG.max_grad_norm).global_norm
        assert not isinstance(norm, DTensor)
        norms.append(norm.item())
        set_learning_rate(optimizer, learning_rate(CONFIG, SCHEDULE, step, STEPS))
        optimizer.step()
    tensors = {name: _full(parameter).detach() for name, parameter in model.named_parameters()}
    tensors |= {f"{name}.grad": _full(parameter.grad) for name, parameter in model.named_parameters()}
    return norms, tensors


def _train_on_mesh(shape: tuple[int, int, int]) -> tuple[list[float], dict[str, list[float]]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    model = fully_shard(Quadratic(mesh), mesh=mesh["replicate", "shard"])
    model.set_gradient_divide_factor(1.0)
    replicate, shard, _ = mesh.get_coordinate()
    rank, size = replicate * shape[1] + shard, shape[0] * shape[1]
    unneeded = patch.object(Heartbeat, "waiting", side_effect=AssertionError("a collective of one rank"))
    with unneeded if mesh.size() == 1 else nullcontext():
        norms, tensors = _train(model, list(range(rank, NUM_BATCHES, size)))
    return norms, {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 3, 1)], ids=str)
def test_norm_clip_and_update_equal_one_process(shape):
    expected_norms, expected = _train(Quadratic(None), list(range(NUM_BATCHES)))
    assert min(expected_norms) > 2 * CONFIG.max_grad_norm
    for norms, tensors in run_ranks(shape[0] * shape[1] * shape[2], _train_on_mesh, shape):
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            actual = torch.tensor(tensors[name], dtype=torch.float64)
            torch.testing.assert_close(
                actual, tensor.flatten(), rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_norm_of_one_process_counts_every_element():
    model = Quadratic(None)
    model(_draw(seed=5)).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    before = gradients.clone()
    assert clip_gradients(model.parameters(), None).global_norm.item() == pytest.approx(before.norm().item(), rel=1e-14)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), before, rtol=0, atol=0)


def test_small_gradients_are_not_scaled_up():
    model = Quadratic(None)
    model(_draw(seed=5)).backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = clip_gradients(model.parameters(), 1e6).global_norm
    assert norm < 1e6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name])


def test_norm_that_is_not_finite_is_handed_back():
    model = Quadratic(None)
    model(_draw(seed=5)).backward()
    model.norm.grad[1] = float("nan")
    assert clip_gradients(model.parameters(), 1.0).global_norm.isnan()


def test_half_precision_gradients_are_our_bug():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(AssertionError, match=r"gradients of .*bfloat16"):
        clip_gradients([parameter], 1.0)
