"""Collectives of a training step at tp 2, counted by name and bytes, against the numbers expected of the layers."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megalin.data.batch import Batch
from megalin.model.language_model import LanguageModel
from megalin.parallel.data_parallel import shard_model
from megalin.train.step import accumulate_gradients
from tests.cases import (
    BIASED,
    CASES,
    COLLECTIVES,
    HIDDEN_SIZE,
    LENGTH,
    NORMS,
    REPRESENTATIVES,
    Case,
    make_inputs,
)
from tests.parallel.on_ranks import make_mesh, materialise
from tests.ranks import run_ranks

TP = 2
TOKENS = len(make_inputs().tokens) * LENGTH
WIDE = 4 * TOKENS * HIDDEN_SIZE
"""Bytes of the full residual stream in fp32."""
NARROW = 4 * TOKENS
"""Bytes of one fp32 number a token."""


class Call(NamedTuple):
    """One collective: its name, and the bytes of the full tensor that it reduces or gathers."""

    direction: Literal["forward", "backward"]
    name: str
    num_bytes: int


class CollectiveRecorder(TorchDispatchMode):
    """Records the collectives of its body on groups of more than one rank, functional or not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if function.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            numel = args[0].numel() * (TP if name.startswith("all_gather") else 1)
            self._count(name, numel * args[0].element_size())
        elif function.namespace == "c10d":
            # Data parallelism's collectives, on the data axis, which has one rank here.
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            if dist.ProcessGroup.unbox(group).size() > 1:
                self._count(f"c10d.{name}", -1)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, num_bytes: int) -> None:
        direction = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        self.calls[Call(direction, name, num_bytes)] += 1


def _calls(case: Case, sequence_parallel: bool) -> Counter[Call]:
    """Counts the collectives of a training step with one micro-batch, forward and backward."""
    mesh = make_mesh(TP, sequence_parallel=sequence_parallel)
    model = LanguageModel(case.model, mesh.tp)
    shard_model(
        model, list(model.blocks), model.full_precision_modules(), mesh, compute_dtype=torch.float32, head=model.head
    )
    materialise(model)
    tokens, labels, documents = make_inputs()
    batch = Batch(tokens, labels, documents, torch.arange(len(tokens)))
    with CollectiveRecorder() as recorder:
        accumulate_gradients(model, [batch], mesh)
    return recorder.calls


FAST = (*(case.name for case in REPRESENTATIVES), NORMS.name, BIASED.name)


def _run(fast: bool) -> dict[tuple[str, bool], Counter[Call]]:
    cases = [case for case in CASES if (case.name in FAST) == fast]
    return {(case.name, layout): _calls(case, layout) for case in cases for layout in (False, True)}


@lru_cache
def _results(fast: bool) -> list[dict[tuple[str, bool], Counter[Call]]]:
    return run_ranks(TP, _run, fast)


def results(name: str) -> list[dict[tuple[str, bool], Counter[Call]]]:
    """The calls of each rank, by model and layout, for the models of the group of ranks that has this one."""
    return _results(name in FAST)


def expected_counts(case: Case) -> tuple[int, int, list[int]]:
    """Number of sub-layers and input layers, number of full-width norms, and bytes of each partial gradient."""
    sublayers = [sublayer.type for _, block in case.model.blocks() for sublayer in block.sublayers]
    num_inputs = sum(COLLECTIVES[kind].num_input_layers for kind in set(sublayers))
    partial = [4 * number for kind in sublayers for number in COLLECTIVES[kind].partial_gradients]
    partial += [4 * number for kind in set(sublayers) for number in COLLECTIVES[kind].input_partial_gradients]
    return len(sublayers) + num_inputs, sum(COLLECTIVES[kind].num_norms for kind in sublayers), partial


def contractions(case: Case) -> Counter[Call]:
    """All-reduces of contracted widths: of all tokens, with and without sequence parallelism."""
    calls: Counter[Call] = Counter()
    for sublayer in (sublayer for _, block in case.model.blocks() for sublayer in block.sublayers):
        for direction, width in zip(("forward", "backward"), COLLECTIVES[sublayer.type].contracted, strict=False):
            calls[Call(direction, "all_reduce", width * NARROW)] += 1
    return calls


WEIGHTLESS = [case for case in CASES if case.model.norm == "srmsnorm"]
"""Models whose norms have no parameters: each such parameter adds a small all-reduce under sequence parallelism."""
every_weightless_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in FAST)) for case in WEIGHTLESS],
)


@every_weightless_case
def test_one_all_reduce_a_sublayer_each_way(case: Case):
    num_layers, num_norms, partial = expected_counts(case)
    expected = Counter({Call("forward", "all_reduce", WIDE): num_layers + 1})  # + 1: the embedding
    expected[Call("forward", "all_reduce", NARROW)] += num_norms + 3  # + 3: maximum, sum and target of the loss
    expected[Call("backward", "all_reduce", WIDE)] += num_layers + 1  # + 1: the head
    for num_bytes in partial:
        expected[Call("backward", "all_reduce", num_bytes)] += 1
    expected += contractions(case)
    for rank in results(case.name):
        assert rank[case.name, False] == expected


@every_weightless_case
def test_sequence_parallelism_gathers_and_scatters_instead(case: Case):
    """The bytes stay the same: an all-reduce is a reduce-scatter and an all-gather."""
    num_layers, num_norms, partial = expected_counts(case)
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    expected = Counter({Call("forward", "all_reduce", NARROW): 3})  # the loss
    expected += Counter({Call("forward", scatter, NARROW): num_norms, Call("backward", gather, NARROW): num_norms})
    for direction, ends in (("forward", (gather, scatter)), ("backward", (scatter, gather))):
        for name in ends:  # the head gathers, the embedding scatters
            expected[Call(direction, name, WIDE)] += num_layers + 1
    for num_bytes in partial:
        expected[Call("backward", "all_reduce", num_bytes)] += 1
    expected += contractions(case)
    for rank in results(case.name):
        assert rank[case.name, True] == expected


def test_norms_with_parameters_cost_small_collectives_only():
    """A layer norm on sharded heads sends sum and sum of squares, each way. A weight of the residual stream sends
    nothing, and its gradient with sequence parallelism."""
    num_blocks, pair, vector = NORMS.model.num_layers, 2 * NARROW, 4 * HIDDEN_SIZE
    residual_vectors = num_blocks * (2 + 1 + 2) + 2
    for rank in results(NORMS.name):
        plain, sharded = rank[NORMS.name, False], rank[NORMS.name, True]
        for calls in (plain, sharded):
            assert (
                calls[Call("forward", "all_reduce", pair)] == calls[Call("backward", "all_reduce", pair)] == num_blocks
            )
        assert plain[Call("backward", "all_reduce", vector)] == 0
        assert sharded[Call("backward", "all_reduce", vector)] == residual_vectors


def test_biases_cost_a_small_gradient_with_sequence_parallelism_only():
    """A block has weight and bias of two norms, and the biases of two row-parallel linear layers."""
    num_blocks, vector = BIASED.model.num_layers, 4 * HIDDEN_SIZE
    for rank in results(BIASED.name):
        plain, sharded = rank[BIASED.name, False], rank[BIASED.name, True]
        assert plain[Call("forward", "all_reduce", WIDE)] == plain[Call("backward", "all_reduce", WIDE)]
        assert plain[Call("forward", "all_reduce", WIDE)] == 2 * num_blocks + 1
        assert plain[Call("backward", "all_reduce", vector)] == 0
        assert sharded[Call("backward", "all_reduce", vector)] == num_blocks * (2 + 1 + 2 + 1) + 2
