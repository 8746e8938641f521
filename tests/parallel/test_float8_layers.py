"""FP8 linear layers on ranks against matmuls of dequantised full matrices in fp64, and the magnitudes of weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalin.errors import ConfigError
from megalin.ops.choices import Activation
from megalin.parallel.collectives import all_gather, local_slice
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.float8_layers import (
    Float8Settings,
    check_capability,
    enable_float8,
    find_layers,
    float8_linears,
    update_weight_magnitudes,
)
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import TensorParallel, full_tensor, local
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, materialise, to_arrays, to_tensors
from tests.ranks import run_ranks

BATCH, LENGTH, WIDTH, INNER = 2, 12, 64, 96
SETTINGS = Float8Settings(min_width=16)


class Layers(nn.Module):
    """(x W_1 * x W_2 + x W_3) W_4 and a narrow map of x; each rank's part of a size divides by 16."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.up = ColumnParallelLinear(WIDTH, INNER, parts=2, tp=tp, std=0.3, name="inner")
        self.side = ColumnParallelLinear(WIDTH, INNER, parts=1, bias=True, tp=tp, std=0.3, name="inner")
        self.down = RowParallelLinear(INNER, WIDTH, bias=True, tp=tp, std=0.3, name="inner")
        self.narrow = ColumnParallelLinear(WIDTH, 12, tp=tp, std=0.3, name="narrow")

    def forward(self, x: Tensor) -> Tensor:
        entered = self.tp.enter(x)
        a, b = self.up(entered)
        (c,), (d,) = self.side(x, gather_input=True), self.narrow(entered)
        return self.down(a * b + c) + self.tp.leave(d.sum(-1, keepdim=True))


def dequantised(x: Tensor) -> Tensor:
    """x with each row [..., K] rounded to e4m3 times a power of two, by logarithms."""
    magnitude = x.abs().amax(-1, keepdim=True)
    scale = torch.where(magnitude == 0, 1.0, torch.exp2(torch.ceil(torch.log2(magnitude / 448))))
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Dense(torch.autograd.Function):
    """The FP8 linear map of full matrices, without scales or codes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return dequantised(x) @ dequantised(weight).T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dequantised(dy) @ dequantised(weight.T.contiguous()).T, dy.flatten(0, 1).T @ x.flatten(0, 1)


def dense(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    a, b = Dense.apply(x, weights["up.weight"].flatten(0, 1)).chunk(2, -1)
    c = Dense.apply(x, weights["side.weight"][0]) + weights["side.bias"][0]
    d = (x @ weights["narrow.weight"][0].T).sum(-1, keepdim=True)
    return Dense.apply(a * b + c, weights["down.weight"]) + weights["down.bias"] + d


def draw() -> tuple[Tensor, Tensor]:
    """Tokens of very different magnitudes, one of them zero, and the gradient of the output. Fifth powers, of weights
    too, so that many codes are subnormal: those of others times their scale do not depend on the scale."""
    generator = torch.Generator().manual_seed(3)
    x, dy = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64) ** 5
    x = x * torch.randn(BATCH, LENGTH, 1, generator=generator).exp()
    x[0, 5] = 0.0
    return x, dy


def run(tp: int, sequence_parallel: bool) -> Arrays:
    """Output and gradients of all ranks. Data-parallel ranks read the same samples."""
    mesh = make_mesh(tp, sequence_parallel=sequence_parallel)
    module = Layers(mesh.tp).to(torch.float64)
    enable_float8(module, [module], SETTINGS)
    shard_model(module, [], [], mesh, compute_dtype=torch.float64)
    materialise(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            local(parameter).copy_(0.25 if name.endswith("bias") else 300 * local(parameter) ** 5)
    update_weight_magnitudes(module)
    x, dy = (local_slice(t, mesh.tp.axis, dim=1) if sequence_parallel else t for t in draw())
    x = x.clone().requires_grad_()
    y = module(x)
    (y * dy).sum().backward()
    found = {"y": y, "gradient": x.grad}
    if sequence_parallel:
        found = {name: all_gather(tensor, mesh.tp.axis, dim=1) for name, tensor in found.items()}
    for name, parameter in module.named_parameters():
        found |= {
            name: full_tensor(parameter.detach()),
            f"gradient.{name}": full_tensor(parameter.grad) / mesh.data.size,
        }
    return to_arrays(found)


def check(world_size: int, tp: int, sequence_parallel: bool) -> None:
    x, dy = draw()
    for arrays in run_ranks(world_size, run, tp, sequence_parallel):
        found = to_tensors(arrays)
        weights = {n: found.pop(n).requires_grad_() for n in list(found) if not n.startswith(("y", "gradient"))}
        leaf = x.clone().requires_grad_()
        y = dense(weights, leaf)
        (y * dy).sum().backward()
        expected = {"y": y, "gradient": leaf.grad} | {f"gradient.{n}": w.grad for n, w in weights.items()}
        assert_close(found, expected, 1e-13)


def test_layers_over_ranks_with_sharded_weights_are_those_of_full_matrices():
    check(4, 2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "tp", "sequence_parallel"),
    [(1, 1, False), (2, 2, False), (3, 1, False), (4, 4, True), (6, 2, False)],
)
def test_layers_on_other_meshes_are_those_of_full_matrices(world_size, tp, sequence_parallel):
    check(world_size, tp, sequence_parallel)


def whole(width: int = WIDTH) -> Layers:
    module = Layers(TensorParallel())
    module.up.in_features = width
    return module


def test_wide_layers_multiply_in_fp8_and_narrow_ones_do_not():
    module = whole()
    enable_float8(module, [module], SETTINGS)
    assert [name for name, _ in float8_linears(module)] == ["up", "side", "down"]
    assert find_layers(module, [module], SETTINGS) == (["up", "side", "down"], ["narrow"])


def test_a_model_without_a_wide_layer_is_refused():
    module = whole()
    with pytest.raises(ConfigError, match=r"no linear layer of the blocks has at least 256 inputs and outputs \(the"):
        find_layers(module, [module], Float8Settings())


def test_a_size_that_is_no_multiple_of_16_is_refused():
    module = whole(width=60)
    with pytest.raises(ConfigError, match=r"the matrix of up on a rank has 192 outputs and 60 inputs; use widths that"):
        find_layers(module, [module], SETTINGS)


def test_a_gpu_without_fp8_is_refused():
    check_capability("NVIDIA L4", (8, 9))
    with pytest.raises(ConfigError, match=r"capability 8\.9 or above \(Ada, Hopper, Blackwell\), but NVIDIA A100 has"):
        check_capability("NVIDIA A100", (8, 0))


def test_weight_gradients_in_fp8_contract_over_the_tokens():
    module = nn.Module()
    module.linear = RowParallelLinear(32, 48, tp=TensorParallel(), std=0.3, name="width")
    enable_float8(module, [module], Float8Settings(16, weight_gradient=True))
    materialise(module)
    update_weight_magnitudes(module)
    x, dy = (torch.randn(32, size, generator=torch.Generator().manual_seed(size)) for size in (32, 48))
    module.linear(x).backward(dy)
    expected = dequantised(dy.T.double()) @ dequantised(x.T.double()).T
    assert_close({"gradient": module.linear.weight.grad}, {"gradient": expected}, 1e-6)


def _tokens_that_are_not_finite() -> list[list[bool]]:
    mesh = make_mesh(2)
    module = Layers(mesh.tp)
    enable_float8(module, [module], SETTINGS)
    materialise(module)
    update_weight_magnitudes(module)
    x = draw()[0].float()[..., : INNER // 2].clone()
    if dist.get_rank() == 1:
        x[1, 3, 7] = float("nan")
    return module.down(x).isnan().all(-1).tolist()


def test_a_token_with_nan_on_one_rank_is_nan_on_all_and_others_are_not():
    for found in run_ranks(2, _tokens_that_are_not_finite):
        assert [(b, t) for b in range(BATCH) for t in range(LENGTH) if found[b][t]] == [(1, 3)]


class Gated(nn.Module):
    """A gated linear unit of two FP8 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, INNER, parts=2, tp=TensorParallel(), std=0.3, name="inner")
        self.down = RowParallelLinear(INNER, WIDTH, tp=TensorParallel(), std=0.3, name="inner")

    def forward(self, x: Tensor, activation: Activation) -> Tensor:
        product, rows = self.up.gated(x, activation)
        return self.down.forward_quantized(product, rows)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_a_gated_product_with_its_codes_gives_the_bits_of_separate_casts(activation, monkeypatch):
    module = Gated()
    enable_float8(module, [module], SETTINGS)
    module.to_empty(device="cpu")
    for seed, parameter in enumerate(module.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    update_weight_magnitudes(module)
    module.to(torch.bfloat16)
    for linear in (module.up, module.down):
        assert linear.float8 is not None
        linear.float8.float()  # magnitudes stay in fp32
    x, dy = (tensor.bfloat16() for tensor in draw())
    found = []
    for choices in ("gated_product=triton", "gated_product=triton,quantized_gated_product=triton"):
        monkeypatch.setenv("MEGALIN_KERNELS", choices)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = module(leaf, activation)
        y.backward(dy)
        found.append([y.detach(), leaf.grad, *(parameter.grad.clone() for parameter in module.parameters())])
        fused = module.up.gated(x, activation)[1] is not None
        assert fused == ("quantized" in choices)
    for separate, fused in zip(*found, strict=True):
        assert torch.equal(separate, fused)
