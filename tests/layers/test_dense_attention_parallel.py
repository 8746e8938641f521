"""Block body of DANet over 1, 2 and 4 ranks: values, all gradients, and the collectives of docs/parallelism.md."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from megalin.layers.mixers.base import BuildContext, update_derived_buffers
from megalin.layers.mixers.dense_attention import DenseAttention
from megalin.parallel.collectives import all_gather
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel, assign, full_tensor
from tests.layers.test_dense_attention import WIDTH, build, configured, context, inputs_of, outcome
from tests.model.test_collective_counts import Call, CollectiveRecorder
from tests.numerics import Tensors, assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, materialise, to_arrays, to_tensors
from tests.ranks import run_ranks

LENGTH = 20
SETTINGS = [(kind, heads) for kind in ("global", "shifted") for heads in (1, 4)]
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def _inputs(packed: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    x, valid = inputs_of(LENGTH, padded=True)
    ids = (torch.arange(LENGTH) // 7).int().expand(3, -1) if packed else None
    return x, valid, ids, torch.linspace(-1.0, 1.0, x.numel(), dtype=torch.float64).view_as(x)


def _of_one_process(kind: str, heads: int, packed: bool) -> Tensors:
    mixer, (x, valid, ids, dy) = build(configured(kind, heads)), _inputs(packed)
    return outcome(mixer, x, context(valid=valid, document_ids=ids), dy) | {"ratio": mixer.ratio}


def _sharded(kind: str, heads: int, packed: bool, tp: TensorParallel) -> tuple[Tensors, Counter[Call]]:
    mixer = configured(kind, heads).build(BuildContext(WIDTH, 1, 3, tp, 0.2, "place", 0.2)).to(torch.float64)
    materialise(mixer)
    for name, weight in build(configured(kind, heads)).named_parameters():
        assign(mixer.get_parameter(name), weight.detach())
    update_derived_buffers([mixer])
    x, valid, ids, dy = _inputs(packed)
    if tp.sequence_parallel:
        x, dy = tp.local_slice(x, dim=TOKENS), tp.local_slice(dy, dim=TOKENS)
    x = x.clone().requires_grad_()
    with CollectiveRecorder() as recorder:
        y = mixer(x, context(valid=valid, document_ids=ids), None).y
        y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    if tp.sequence_parallel:
        found = {name: all_gather(tensor, tp.axis, dim=TOKENS) for name, tensor in found.items()}
    found |= {name: full_tensor(weight.grad) for name, weight in mixer.named_parameters()}
    return found | {"ratio": mixer.ratio}, recorder.calls


def _run(size: int, sequence_parallel: bool) -> dict[tuple[str, int, bool], tuple[Arrays, Counter[Call]]]:
    tp = make_mesh(size, sequence_parallel=sequence_parallel).tp
    results = {}
    for kind, heads in SETTINGS:
        for packed in (False, True):
            found, calls = _sharded(kind, heads, packed, tp)
            results[kind, heads, packed] = to_arrays(found), calls
    return results


@lru_cache
def results(size: int, sequence_parallel: bool) -> list[dict[tuple[str, int, bool], tuple[Arrays, Counter[Call]]]]:
    return run_ranks(size, _run, size, sequence_parallel)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "heads"), SETTINGS)
@pytest.mark.parametrize(("size", "sequence_parallel"), LAYOUTS)
def test_values_and_every_gradient_equal_one_process(
    size: int, sequence_parallel: bool, kind: str, heads: int, packed: bool
):
    expected = _of_one_process(kind, heads, packed)
    for rank in results(size, sequence_parallel):
        assert_close(to_tensors(rank[kind, heads, packed][0]), expected, 1e-11)


WHOLE = 3 * LENGTH * WIDTH * 8
"""Bytes of [B, T, D] in fp64."""
GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
DOCUMENTED = {
    # Several heads all-gather Y and reduce-scatter its gradient; one head all-reduces Y and its gradient. The other
    # collectives are those at the residual stream.
    (4, False): {"forward": [GATHER, REDUCE], "backward": [SCATTER, REDUCE]},
    (1, False): {"forward": [REDUCE, REDUCE], "backward": [REDUCE, REDUCE]},
    (4, True): {"forward": [GATHER, GATHER, SCATTER], "backward": [GATHER, SCATTER, SCATTER]},
    (1, True): {"forward": [GATHER, REDUCE, SCATTER], "backward": [GATHER, REDUCE, SCATTER]},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "heads"), SETTINGS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_are_the_documented_ones(sequence_parallel: bool, kind: str, heads: int, packed: bool):
    documented = DOCUMENTED[heads, sequence_parallel]
    expected = Counter(Call(way, name, WHOLE) for way, names in documented.items() for name in names)
    for rank in results(2, sequence_parallel):
        assert rank[kind, heads, packed][1] == expected


class _Stack(torch.nn.Module):
    """Three block bodies with the same sharding."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        config = configured(heads=4)
        self.layers = torch.nn.ModuleList(config.build(BuildContext(WIDTH, i, 3, tp, 0.2, "", 0.2)) for i in range(3))


def _updated_ratios(tp: int, shard: int | None) -> tuple[Arrays, Counter[Call]]:
    mesh = make_mesh(tp, shard=shard)
    stack = _Stack(mesh.tp)
    shard_model(stack, list(stack.layers), [], mesh, compute_dtype=torch.float32)
    materialise(stack)
    mixers = [mixer for mixer in stack.layers if isinstance(mixer, DenseAttention)]
    with CollectiveRecorder() as recorder:
        update_derived_buffers(mixers)
    return to_arrays({f"{i}": mixer.ratio for i, mixer in enumerate(mixers)}), recorder.calls


@pytest.mark.parametrize(
    ("world_size", "tp", "shard"), [(2, 1, None), (3, 1, None), (2, 2, None), (4, 2, None), (4, 2, 1), (4, 1, 2)]
)
def test_the_ratios_of_a_sharded_model_take_one_all_reduce(world_size: int, tp: int, shard: int | None):
    """The all-reduce is over the largest magnitude of each full matrix: two fp32 numbers a layer."""
    whole = _Stack(TensorParallel())
    materialise(whole)
    expected = {f"{i}": layer.ratio for i, layer in enumerate(whole.layers)}
    for found, calls in run_ranks(world_size, _updated_ratios, tp, shard):
        assert_close(to_tensors(found), expected, 1e-7)
        assert calls == Counter({Call("forward", "all_reduce", 4 * 2 * 3): 1})
