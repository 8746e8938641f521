"""Interpreted kernels of two-phase scans on gloo ranks, with every state exchange, against full sequences."""

from __future__ import annotations

import os
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megalin.data.batch import take_samples
from megalin.ops.dispatch import backend as backends
from megalin.parallel.config import ExchangeName, ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor
from tests.model.test_context_parallel import AS_INDUCTOR_CUTS, on_axis, packed, split_tokens
from tests.numerics import assert_close
from tests.ops.scans import scans
from tests.ops.scans.scans import Case
from tests.parallel.on_ranks import Arrays, to_arrays, to_tensors
from tests.ranks import run_ranks

CP, ROWS, TOKENS = 3, 2, 210
EXCHANGES: tuple[ExchangeName, ...] = get_args(ExchangeName)[1:]
SCANS = {"transnormer": "decay_scan", "hgrn2": "forget_gate_scan", "mamba2": "scalar_decay_scan"}
"""Models and the scans of their mixers."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")


def interpret(*ops: str) -> None:
    """Makes this rank run the ops with their kernels in Triton's interpreter."""
    import tests.interpreter  # noqa: F401

    os.environ["MEGALIN_KERNELS"] = ",".join(f"{op}=triton" for op in ops)


def make_inputs(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two full sequences of a scan, and its options: the first of one document, the second of five, which start before,
    at and after a rank's first token."""
    torch.manual_seed(0)
    inputs, options = scans.make_inputs(name, Case(TOKENS, key=16, value=24, decay=0.01, batch=ROWS))
    starts = torch.zeros(ROWS, TOKENS, dtype=torch.int32)
    starts[1, [40, 69, 140, 141]] = 1
    return inputs, options | {"document_ids": starts.cumsum(1, dtype=torch.int32)}


def _scans() -> dict[tuple[str, str], Arrays]:
    interpret(*(f"split_{name}" for name in scans.SCANS))
    found = {}
    for name, exchange in ((name, exchange) for name in scans.SCANS for exchange in EXCHANGES):
        cp = Mesh(ParallelConfig(cp=CP, cp_exchange=exchange), torch.device("cpu")).cp
        inputs, options = make_inputs(name)
        ids = cp.shard(options.pop("document_ids"))
        shard = cp.sequence_shard(cp.shard_documents(ids, ids))
        leaves = {key: cp.shard(x).clone().requires_grad_() for key, x in inputs.items()}
        output = scans.SCANS[name].scan(**leaves, **options, document_ids=ids, shard=shard).output
        output.square().sum().backward()
        assert backends.used()["split_" + name].backend == "triton"
        found[name, exchange] = to_arrays({"output": output} | {key: x.grad for key, x in leaves.items()})
    return found


def _models() -> dict[str, tuple[Arrays, Arrays]]:
    """Losses and gradients of compiled kernels and of the reference; of one sequence, as the interpreter is slow."""
    batch = take_samples(packed(24), slice(0, 1))
    found = {}
    for name, op in SCANS.items():
        pair = []
        for backend, ops in ((AS_INDUCTOR_CUTS, ("split_" + op,)), (None, ())):
            interpret(*ops)
            torch._dynamo.reset()
            mesh, model = on_axis(CP, name, compute_dtype=torch.float32, backend=backend)
            sums = model.loss_sums(split_tokens(batch, mesh.cp).inputs())
            sums.sum().backward()
            gradients = {key: full_tensor(parameter.grad) for key, parameter in model.named_parameters()}
            pair.append(to_arrays(gradients | {"sums": sums}))
            assert backends.used()["split_" + op].backend == ("triton" if ops else "reference")
        found[name] = pair[0], pair[1]
    return found


def _run() -> tuple[dict[tuple[str, str], Arrays], dict[str, tuple[Arrays, Arrays]]]:
    return _scans(), _models()


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(CP, _run, timeout=400.0)


@pytest.mark.slow
def test_scans_over_ranks_are_those_of_full_sequences(ranks):
    for name in scans.SCANS:
        inputs, options = make_inputs(name)
        leaves = {key: x.double().requires_grad_() for key, x in inputs.items()}
        output = scans.SCANS[name].reference(**leaves, **options).output
        output.square().sum().backward()
        expected = {"output": output} | {key: x.grad for key, x in leaves.items()}
        for exchange in EXCHANGES:
            shards = [to_tensors(found[name, exchange]) for found, _ in ranks]
            gathered = {key: torch.cat([shard[key] for shard in shards], dim=1) for key in expected}
            assert_close(gathered, expected, 2e-5)


@pytest.mark.slow
def test_compiled_models_have_the_gradients_of_the_reference(ranks):
    for _, results in ranks:
        for kernels, reference in results.values():
            assert_close(to_tensors(kernels), to_tensors(reference), 2e-5)
