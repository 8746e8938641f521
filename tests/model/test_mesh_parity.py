"""Every case of tests/cases.py on meshes of 1 to 4 ranks against one process, in fp64: weights, losses, gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalin.model.language_model import LanguageModel
from megalin.parallel import mesh as meshes
from megalin.parallel.collectives import all_gather
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor
from tests.cases import CASES, NAMES, REPRESENTATIVES, VOCAB_SIZE, Case, build, make_inputs
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, materialise, to_arrays, to_tensors
from tests.parallel.shared_memory import buffers_in_files
from tests.ranks import run_ranks


class Layout(NamedTuple):
    """Mesh and execution of a model: `async_tp` turns on async tensor parallelism."""

    world_size: int
    tp: int
    sequence_parallel: bool = False
    shard: int | None = None
    recompute: bool = False
    async_tp: bool = False
    cases: tuple[str, ...] = tuple(NAMES)


MIXERS = tuple(case.name for case in REPRESENTATIVES)
FEW = ("rodimus", "mamba2", "softmax", "ffn")
"""Weights on every rank that meet sharded data, a convolution, attention, and a feed-forward network."""


LAYOUTS = {
    "one rank": Layout(1, 1, cases=MIXERS),
    "tp2": Layout(2, 2, cases=FEW),
    "tp2 sequence parallel": Layout(2, 2, sequence_parallel=True),
    "dp3 sharded": Layout(3, 1, cases=FEW),
    "tp3 sequence parallel, async": Layout(3, 3, sequence_parallel=True, async_tp=True, cases=MIXERS),
    "tp2 dp2 sharded, sequence parallel": Layout(4, 2, sequence_parallel=True, shard=2, cases=MIXERS),
}
MORE_LAYOUTS = {
    "one rank, every case": Layout(1, 1),
    "tp2, every case": Layout(2, 2),
    "tp3 sequence parallel, async, every case": Layout(3, 3, sequence_parallel=True, async_tp=True),
    "tp2 sequence parallel, recomputed": Layout(2, 2, sequence_parallel=True, recompute=True),
    "tp2 sequence parallel, async, recomputed": Layout(2, 2, sequence_parallel=True, recompute=True, async_tp=True),
    "tp3 sequence parallel": Layout(3, 3, sequence_parallel=True),
    "tp4 sequence parallel": Layout(4, 4, sequence_parallel=True),
    "tp2 dp2 replicated, recomputed": Layout(4, 2, shard=1, recompute=True),
    "dp3 sharded, every case": Layout(3, 1),
    "tp2 dp2 sharded, sequence parallel, every case": Layout(4, 2, sequence_parallel=True, shard=2),
    "dp4 hybrid": Layout(4, 1, shard=2),
}


def loss_weights() -> Tensor:
    tokens = make_inputs().tokens
    return torch.linspace(0.5, 1.5, tokens.numel(), dtype=torch.float64).view_as(tokens)


def _outcome(case: Case, mesh: Mesh, recompute: bool) -> dict[str, Tensor]:
    model = LanguageModel(case.model, mesh.tp, recompute=recompute).to(torch.float64)
    shard_model(
        model, list(model.blocks), model.full_precision_modules(), mesh, compute_dtype=torch.float64, head=model.head
    )
    materialise(model)
    found = {f"weight:{name}": full_tensor(p.detach()) for name, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        # A sharded buffer is gathered along its only dimension; a scalar is equal on every rank.
        found[f"buffer:{name}"] = all_gather(buffer, mesh.tp.axis, dim=0) if buffer.dim() else buffer
    # Three data ranks get 2, 1 and 1 sequences, with no effect on the sum of losses.
    tokens, labels, documents = (x.tensor_split(mesh.data.size)[mesh.data.rank] for x in make_inputs())
    output = model(tokens, labels=labels, document_ids=documents)
    (output.token_losses * loss_weights().tensor_split(mesh.data.size)[mesh.data.rank]).sum().backward()
    found["logits"] = all_gather(output.logits.detach(), mesh.tp.axis, dim=2)[..., :VOCAB_SIZE]
    found["losses"] = output.token_losses
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[f"gradient:{name}"] = full_tensor(parameter.grad)
    return found


def _run(layout: Layout, folder: Path) -> tuple[int, dict[str, Arrays]]:
    with patch.object(meshes, "open_async_tp_buffers", buffers_in_files(folder)) if layout.async_tp else nullcontext():
        mesh = make_mesh(layout.tp, sequence_parallel=layout.sequence_parallel, shard=layout.shard)
    assert (mesh.tp.buffers is not None) == layout.async_tp
    cases = [case for case in CASES if case.name in layout.cases]
    return mesh.data.rank, {case.name: to_arrays(_outcome(case, mesh, layout.recompute)) for case in cases}


@lru_cache
def results(layout: Layout) -> list[tuple[int, dict[str, Arrays]]]:
    with TemporaryDirectory() as folder:
        return run_ranks(layout.world_size, _run, layout, Path(folder))


@lru_cache
def one_process(name: str) -> dict[str, Tensor]:
    """The same step on plain tensors, which tests/model/test_language_model.py checks against the definitions."""
    model, inputs = build(CASES[NAMES.index(name)].model), make_inputs()
    found = {f"weight:{key}": p.detach().clone() for key, p in model.named_parameters()}
    found |= {f"buffer:{key}": buffer for key, buffer in model.named_buffers()}
    output = model(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    (output.token_losses * loss_weights()).sum().backward()
    found |= {"logits": output.logits.detach()[..., :VOCAB_SIZE], "losses": output.token_losses.detach()}
    return found | {f"gradient:{key}": p.grad for key, p in model.named_parameters()}


def by_rank(layout: Layout, name: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Each rank's tensors and the expected ones."""
    data_size, pairs = layout.world_size // layout.tp, []
    for data_rank, found in results(layout):
        expected = {
            key: tensor.tensor_split(data_size)[data_rank] if key in ("logits", "losses") else tensor
            for key, tensor in one_process(name).items()
        }
        pairs.append((to_tensors(found[name]), expected))
    return pairs


every_case_of_every_layout = pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(case, layout, id=f"{case}-{name}", marks=[pytest.mark.slow] * (name in MORE_LAYOUTS))
        for name, layout in (LAYOUTS | MORE_LAYOUTS).items()
        for case in layout.cases
    ],
)


@every_case_of_every_layout
def test_initial_weights_and_buffers_do_not_depend_on_the_mesh(name: str, layout: Layout):
    """Compares bits; memory held NaN before."""
    for found, expected in by_rank(layout, name):
        for key in expected:
            if key.startswith(("weight:", "buffer:")):
                assert torch.equal(found[key], expected[key]), key


@every_case_of_every_layout
def test_losses_and_every_gradient_equal_one_process(name: str, layout: Layout):
    for found, expected in by_rank(layout, name):
        assert_close(found, expected, 1e-11)
