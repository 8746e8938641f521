"""Two-phase scans of sharded sequences on a GPU against fp64: lengths, decays, dtypes, widths, documents, bits."""

import pytest
import torch

from megalin.ops.dispatch import backend as backends
from tests.ops.scans.scans import SCANS, SHARED_KEYS, Case, compare_shards

DOCUMENTS = {
    "one": None,
    "over two shard boundaries": (2.5,),
    "at shard boundaries": (1.0, 2.0),
    "many": (0.3, 0.5, 1.1, 2.6, 2.8),
}
BACKENDS = [("decay_scan", "cuda"), *((name, "triton") for name in SCANS)]
every_scan = pytest.mark.parametrize(("name", "backend"), BACKENDS)


@every_scan
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("length", [1, 63, 65, 1000, 4096])
def test_lengths_and_documents(name, backend, length, documents):
    case = Case(ranks=3, length=length, key=128, value=128, decay=0.1 / length, dtype=torch.bfloat16)
    compare_shards(name, case, DOCUMENTS[documents], device="cuda", backend=backend)


@every_scan
@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.03, 1.0, 30.0])
def test_decays(name, backend, decay):
    case = Case(ranks=4, length=700, key=128, value=64, decay=decay, dtype=torch.bfloat16)
    compare_shards(name, case, (1.5,), device="cuda", backend=backend)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 0.003, 1.0])
def test_other_dtypes(name, dtype, decay):
    compare_shards(name, Case(ranks=3, length=500, key=64, value=64, decay=decay, dtype=dtype), (1.5,), device="cuda")


@every_scan
@pytest.mark.parametrize(("key", "value"), [(16, 24), (80, 40), (256, 64), (13, 21)])
def test_widths(name, backend, key, value):
    case = Case(ranks=3, length=400, key=key, value=value, decay=0.003, dtype=torch.bfloat16)
    compare_shards(name, case, (1.5,), device="cuda", backend=backend)


def test_one_wide_head_of_values():
    case = Case(ranks=2, length=1000, key=64, value=1024, decay=0.003, dtype=torch.bfloat16)
    compare_shards("vector_decay_scan", case, (1.5,), device="cuda")


def test_keys_that_heads_share():
    case = Case(ranks=3, length=1000, key=128, value=64, decay=0.003, dtype=torch.bfloat16)
    compare_shards(SHARED_KEYS, case, (1.5,), device="cuda")


@pytest.mark.parametrize(("name", "backend"), [BACKENDS[0], *BACKENDS[2:]])
def test_auto_runs_the_two_phase_kernels(name, backend):
    case = Case(ranks=2, length=100, key=64, value=64, dtype=torch.bfloat16)
    compare_shards(name, case, device="cuda", backend="auto")
    assert backends.used()["split_" + name] == (backend, "")
