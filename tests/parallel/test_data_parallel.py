"""Sharded data parallelism: dtype of each kind of parameter, shards, and collectives of each ZeRO stage."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from megalin.layers.linear_attention import LinearAttention
from megalin.model.language_model import LanguageModel
from megalin.parallel.data_parallel import (
    finish_backward,
    ordered_cuda_streams,
    prepare_backward,
    shard_model,
)
from megalin.parallel.mesh import Mesh
from megalin.parallel.shard_dim import shard_dim
from megalin.parallel.tensor_parallel import full_tensor, largest_magnitudes, local
from tests.cases import HYBRID, build, make_inputs
from tests.model.test_collective_counts import CollectiveRecorder
from tests.numerics import relative_error
from tests.parallel.on_ranks import make_mesh, materialise
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("shape", "size", "dim"),
    [
        ((4, 48, 36), 2, 0),
        ((2, 48, 36), 4, 2),
        ((2, 48, 35), 4, 1),
        ((2, 47, 35), 4, 0),
        ((384, 48), 3, 0),
        ((383, 48), 3, 1),
        ((3,), 2, 0),
        ((7, 5), 64, 0),
        ((4, 4096, 4096), 64, 2),
    ],
)
def test_weights_are_split_along_a_dimension_that_divides(shape, size, dim):
    assert shard_dim(shape, size) == dim


def _sharded(dtype: torch.dtype, tp: int, **axes: Any) -> tuple[LanguageModel, Mesh]:
    mesh = make_mesh(tp, **axes)
    model = LanguageModel(HYBRID.model, mesh.tp)
    shard_model(model, list(model.blocks), model.full_precision_modules(), mesh, compute_dtype=dtype, head=model.head)
    materialise(model)
    return model, mesh


def _dtypes() -> dict[str, object]:
    """Actual dtypes in a bf16 forward: matmuls, LRPE's frequencies and the scan."""
    (model, _), seen = _sharded(torch.bfloat16, 1), {}
    attention = next(mixer for mixer in model.mixers() if isinstance(mixer, LinearAttention))

    def at_the_mixer(module: nn.Module, args: tuple) -> None:
        x, context, _ = args
        seen["hidden"], seen["theta"] = x.dtype, context.full_precision[0].dtype
        seen["weight"], seen["slopes"] = local(module.out.weight).dtype, module.slopes.dtype

    attention.register_forward_pre_hook(at_the_mixer)
    tokens, labels, documents = make_inputs()
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    output = model(tokens[rows], labels=labels[rows], document_ids=documents[rows])
    output.token_losses.sum().backward()
    seen["logits"], seen["losses"] = output.logits.dtype, output.token_losses.dtype
    seen["at rest"] = {parameter.dtype for parameter in model.parameters()}
    seen["gradients"] = {parameter.grad.dtype for parameter in model.parameters()}
    seen["norm"] = sum(full_tensor(parameter.grad).double().square().sum() for parameter in model.parameters()).item()
    return {name: str(value) if name != "norm" else value for name, value in seen.items()}


def test_bf16_computes_on_fp32_weights_with_frequencies_in_fp32():
    model, (tokens, labels, documents) = build(HYBRID.model), make_inputs()
    model(tokens, labels=labels, document_ids=documents).token_losses.sum().backward()
    expected = sum(parameter.grad.square().sum() for parameter in model.parameters()).item()
    for seen in run_ranks(2, _dtypes):
        assert seen.pop("norm") == pytest.approx(expected, rel=0.05)
        assert seen == {
            "hidden": "torch.bfloat16",
            "theta": "torch.float32",
            "weight": "torch.bfloat16",
            "slopes": "torch.float32",
            "logits": "torch.bfloat16",
            "losses": "torch.float32",
            "at rest": "{torch.float32}",
            "gradients": "{torch.float32}",
        }


class Sent(NamedTuple):
    """Collectives and buffers of a step of two micro-batches, and its gradients."""

    gathers: int
    """All-gathers of weights."""
    reductions: int
    """Reduce-scatters and all-reduces of gradients."""
    buffers: int
    """Buffers allocated for gradients and their sums."""
    gradients: list[Tensor]


def _step(zero: int) -> Sent:
    model, mesh = _sharded(torch.float32, 1, zero=zero)
    tokens, labels, _ = make_inputs()
    allocate = patch.object(DefaultAllocMixin, "allocate", autospec=True, side_effect=DefaultAllocMixin.allocate)
    with CollectiveRecorder() as recorder, allocate as allocated:
        for last in (False, True):
            row = slice(2 * dist.get_rank() + last, 2 * dist.get_rank() + last + 1)
            prepare_backward(model, mesh, last=last)
            with ordered_cuda_streams(model) if last else nullcontext():  # its CUDA streams exist after the first run
                model(tokens[row], labels=labels[row]).token_losses.sum().backward()
    counts: Counter[str] = Counter()
    for call, count in recorder.calls.items():
        counts[call.name] += count
    gradients = [full_tensor(parameter.grad).clone() for parameter in model.parameters()]
    reductions = counts["c10d._reduce_scatter_base_"] + counts["c10d.allreduce_"]
    gathers = counts["c10d._allgather_base_"]
    return Sent(gathers, reductions, allocated.call_count - gathers, gradients)


def _of_one_rank(dtype: torch.dtype) -> list[bool]:
    """Whether gradients on a data axis of one rank have the bits of FSDP's reduction; two steps of two micro-batches,
    without clearing gradients in between. Also checks that each gradient has its weight's dtype."""
    found = []
    for reduced_by_fsdp in (True, False):
        model, mesh = _sharded(dtype, 2)
        tokens, labels, _ = make_inputs()
        for step in range(2):
            for last in (False, True):
                prepare_backward(model, mesh, last=last)
                if reduced_by_fsdp:
                    model.set_requires_gradient_sync(last)
                model(tokens[int(last) :][:1], labels=labels[int(last) :][:1]).token_losses.sum().backward()
            if not reduced_by_fsdp:
                assert step or all(parameter.grad is None for parameter in model.parameters())
                finish_backward(model, mesh)
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert all(gradient.dtype == model.get_parameter(name).dtype for name, gradient in found[-1].items())
    first, second = found
    return [torch.equal(local(first[name]), local(second[name])) for name in first]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_what_one_rank_does_not_reduce_has_the_bits_of_a_reduction(dtype):
    assert all(run_ranks(2, _of_one_rank, dtype)[0])


def _steps() -> list[Sent]:
    return [_step(zero) for zero in (0, 1, 2, 3)]


def test_every_zero_stage_gives_the_same_gradient_for_its_own_gathers_and_reductions():
    replicas, *stages = run_ranks(2, _steps)[0]
    for stage in stages:
        assert max(relative_error(a, b) for a, b in zip(stage.gradients, replicas.gradients, strict=True)) <= 1e-5
    blocks = HYBRID.model.num_layers
    units = blocks + 3  # frequencies in fp32, the head, and the rest of the model
    assert [(sent.gathers, sent.reductions, sent.buffers) for sent in (replicas, *stages)] == [
        (0, units, units),  # with a shard axis of one rank, the sum is in the same buffer
        (units, units, 2 * units),
        (units, 2 * units, 4 * units),
        (2 * (units + blocks), 2 * units, 4 * units),
    ]


class _Vectors(nn.Module):
    """Weights that two ranks do not divide evenly: the second rank's shard of one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.uneven = (nn.Parameter(torch.empty(shape, device="meta")) for shape in ((2, 4), (1, 3)))


def _largest(replicate: bool) -> list[float]:
    mesh, vectors = make_mesh(1, shard=1 if replicate else None), _Vectors()
    shard_model(vectors, [], [], mesh, compute_dtype=torch.float32)
    vectors.to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(vectors.parameters()):
            local(parameter).fill_(-0.5 - number - dist.get_rank())
    return largest_magnitudes(list(vectors.parameters())).tolist()


@pytest.mark.parametrize(("replicate", "expected"), [(False, [1.5, 1.5]), (True, [1.5, 2.5])])
def test_the_largest_magnitude_is_that_of_all_shards(replicate: bool, expected: list[float]):
    """Negative elements count, and an empty shard does not."""
    assert run_ranks(2, _largest, replicate) == [expected, expected]


def test_the_largest_magnitudes_of_plain_weights_and_of_none():
    weights = [torch.tensor([1.0, -3.0]), torch.tensor([[0.25]], dtype=torch.float64)]
    assert largest_magnitudes(weights[:1]).tolist() == [3.0]
    assert largest_magnitudes(weights[1:]).dtype == torch.float64
    assert largest_magnitudes([]).shape == (0,)
