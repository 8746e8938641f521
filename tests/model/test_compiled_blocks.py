"""Gradients of compiled tensor-parallel blocks against those of eager ones.

torch 2.11 silently compiles an in-place collective inside an autograd function to a zero gradient.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megalin.model.block import Block
from megalin.model.language_model import LanguageModel
from megalin.parallel import collectives
from megalin.parallel.config import ParallelConfig
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.fake_mesh import fake_mesh
from megalin.parallel.tensor_parallel import full_tensor
from megalin.train.build import OVERLAP_OPTIONS, build_model
from tests.cases import CASES, NAMES, REPRESENTATIVES, Case, build, make_inputs
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, materialise, to_arrays, to_tensors
from tests.ranks import run_ranks

GLU = "glu-silu"
"""TNL with LRPE and SwiGLU: a full-width norm, a partial gradient and a full-precision parameter in one block."""
INPUT_LAYER = "cosformer2"
"""An input layer, so the first block's input is the result of a collective."""


def _gradients(name: str, sequence_parallel: bool, backend: str | None) -> Arrays:
    mesh = make_mesh(2, sequence_parallel=sequence_parallel)
    model = LanguageModel(CASES[NAMES.index(name)].model, mesh.tp)
    if backend is not None:
        for block in model.blocks:
            options = None if sequence_parallel or backend != "inductor" else OVERLAP_OPTIONS
            block.compile(fullgraph=True, dynamic=False, backend=backend, options=options)
    shard_model(
        model, list(model.blocks), model.full_precision_modules(), mesh, compute_dtype=torch.float32, head=model.head
    )
    materialise(model)
    inputs = make_inputs()
    output = model(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    output.token_losses.sum().backward()
    found = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
    return to_arrays(found | {"losses": output.token_losses})


BACKENDS = {GLU: "inductor", INPUT_LAYER: "aot_eager"}


@patch.object(collectives, "SYNCHRONOUS_DEVICES", frozenset())  # as on a GPU
def _run(name: str, sequence_parallel: bool) -> tuple[Arrays, Arrays, int]:
    """Eager and compiled results, without sequence parallelism under OVERLAP_OPTIONS, and the number of graphs."""
    config = torch._inductor.config
    config.fx_graph_cache = False  # the keys differ between ranks, so no entry is reused
    config.cpp.simdlen = 1  # generating vectorised code, not tested here, takes half of inductor's time
    eager = _gradients(name, sequence_parallel, None)
    compiled = _gradients(name, sequence_parallel, BACKENDS[name])
    return eager, compiled, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _check(name: str, sequence_parallel: bool) -> None:
    for eager, compiled, num_graphs in run_ranks(2, _run, name, sequence_parallel, timeout=280.0):
        assert num_graphs > 0
        assert_close(to_tensors(compiled), to_tensors(eager), 2e-5)


def _one_process(case: Case, backend: str | None) -> dict[str, torch.Tensor]:
    """Losses and gradients of packed documents."""
    model, inputs = build(case.model), make_inputs()
    if backend is not None:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False, backend=backend)
    losses = model(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids).token_losses
    losses.sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()} | {"losses": losses.detach()}


AOT = ("tnl", "rodimus_plus")
"""Mixers whose backward make test traces too: a fixed decay; a convolution, decays of inputs and a window."""


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, id=f"{case.name}-{backend}", marks=[pytest.mark.slow] * (backend != fast))
        for case in REPRESENTATIVES
        for fast in ["aot_eager" if case.name in AOT else "eager"]
        for backend in {fast: 0, "aot_eager": 0}
    ],
)
def test_block_of_every_mixer_is_one_graph(case: Case, backend: str):
    """Traced, not compiled: a graph break raises. With aot_eager the backward is traced too."""
    torch._dynamo.reset()
    assert_close(_one_process(case, backend), _one_process(case, None), 1e-11)


both_layouts = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence_parallel"])


@pytest.mark.slow
@both_layouts
def test_compiled_blocks_have_the_gradients_of_eager_ones(sequence_parallel: bool):
    _check(GLU, sequence_parallel)


@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["replicated", "sequence_parallel"],
)
def test_gradients_reach_an_input_layer_before_compiled_blocks(sequence_parallel: bool):
    """Traced but not compiled: tracing is where the gradient of an unfinished collective would be lost."""
    _check(INPUT_LAYER, sequence_parallel)


@pytest.mark.parametrize(
    ("axes", "cuda_graphs", "early"),
    [
        ({}, False, False),
        ({"tp": 2}, False, False),
        ({"tp": 2}, True, True),
        ({"tp": 2, "sequence_parallel": True}, True, False),
        ({"cp": 2}, False, False),
        ({"cp": 2, "tp": 2}, True, True),
    ],
    ids=str,
)
def test_collectives_start_early_in_a_graph_alone(monkeypatch, axes, cuda_graphs: bool, early: bool):
    compiled = []
    monkeypatch.setattr(Block, "compile", lambda block, **options: compiled.append(options["options"]))
    parallel = ParallelConfig(**axes)
    with fake_mesh(parallel, parallel.tp * parallel.cp) as mesh:
        build_model(
            CASES[NAMES.index(GLU)].model,
            mesh,
            compute_dtype=torch.float32,
            recompute=False,
            compile_blocks=True,
            seed=0,
            overlap=cuda_graphs,
        )
    assert compiled
    assert all(options == (OVERLAP_OPTIONS if early else None) for options in compiled)
