"""Compiled tensor-parallel blocks against eager ones, every gradient.

An in-place collective inside an autograd function compiles to a zero gradient on torch 2.11, without a word.
"""

from __future__ import annotations

import pytest
import torch

from megalin.model.language_model import LanguageModel
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.tensor_parallel import full_tensor
from tests.cases import CASES, NAMES, make_inputs
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, materialise, to_arrays, to_tensors
from tests.ranks import run_ranks

CASE = CASES[NAMES.index("glu-silu")]
"""TNL with LRPE and SwiGLU: a full-width norm, a partial gradient and a full-precision parameter in one block."""


def _gradients(sequence_parallel: bool, compiled: bool) -> Arrays:
    mesh = make_mesh(2, sequence_parallel=sequence_parallel)
    model = LanguageModel(CASE.model, mesh.tp)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
    shard_model(model, list(model.blocks), model.full_precision_modules(), mesh, compute_dtype=torch.float32)
    materialise(model)
    inputs = make_inputs()
    output = model(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    output.token_losses.sum().backward()
    found = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
    return to_arrays(found | {"losses": output.token_losses})


def _run(sequence_parallel: bool) -> tuple[Arrays, Arrays, int]:
    eager = _gradients(sequence_parallel, compiled=False)
    compiled = _gradients(sequence_parallel, compiled=True)
    return eager, compiled, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence_parallel"])
def test_compiled_blocks_have_the_gradients_of_eager_ones(sequence_parallel: bool):
    for eager, compiled, num_graphs in run_ranks(2, _run, sequence_parallel, timeout=250.0):
        assert num_graphs > 0
        assert_close(to_tensors(compiled), to_tensors(eager), 2e-5)
