"""State exchange by transitions that do not commute, on 3 and 4 ranks against one process, with their gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.driver import fold
from megalin.parallel.config import ExchangeName, ParallelConfig
from megalin.parallel.mesh import Mesh
from tests.numerics import assert_close
from tests.ops.scans.matrix_transition import MatrixTransition
from tests.parallel.on_ranks import Arrays, to_arrays, to_tensors
from tests.ranks import run_ranks

BATCH, HEADS, KEY, VALUE, SHARD = 3, 2, 3, 4, 6
CASES: list[tuple[ExchangeName, bool]] = list(product(("all_gather", "ring"), (False, True)))


def full_inputs(size: int) -> dict[str, Tensor]:
    """Every rank's own state and matrix, and weights of the entering states."""
    shapes = {"state": (KEY, VALUE), "matrix": (KEY, KEY), "weight": (KEY, VALUE)}
    generator = torch.Generator().manual_seed(0)
    draws = {name: torch.randn(size, BATCH, HEADS, *shape, generator=generator) for name, shape in shapes.items()}
    return {name: x.double() for name, x in draws.items()}


def documents(size: int, packed: bool) -> Tensor:
    """Ids [B, size SHARD]: with `packed`, documents end inside and at the edges of shards."""
    ids = torch.zeros(BATCH, size * SHARD, dtype=torch.int32)
    if packed:
        ids[1, SHARD + 2] = ids[1, 2 * SHARD] = ids[2, 2 * SHARD + 1] = 1
    return ids.cumsum(1, dtype=torch.int32)


def _on_ranks() -> dict[tuple[str, bool], Arrays]:
    size, results = torch.distributed.get_world_size(), {}
    for exchange, packed in CASES:
        cp = Mesh(ParallelConfig(cp=size, cp_exchange=exchange), torch.device("cpu")).cp
        given = {name: x[cp.axis.rank].clone().requires_grad_() for name, x in full_inputs(size).items()}
        ids = cp.shard(documents(size, packed))
        shard = cp.sequence_shard(cp.shard_documents(ids, ids))
        assert shard is not None
        entering = fold(given["state"], MatrixTransition(given["matrix"]), shard)
        (entering * given["weight"]).sum().backward()
        results[exchange, packed] = to_arrays(
            {"entering": entering, "d_state": given["state"].grad, "d_matrix": given["matrix"].grad}
        )
    return results


def one_process(size: int, packed: bool) -> list[dict[str, Tensor]]:
    """The recurrence, rank by rank, with autograd."""
    given = {name: x.requires_grad_() for name, x in full_inputs(size).items()}
    shards = documents(size, packed).chunk(size, 1)
    entering = [torch.zeros_like(given["state"][0])]
    for before, after, state, matrix in zip(shards, shards[1:], given["state"], given["matrix"], strict=False):
        through = (before[:, 0] == before[:, -1]).view(-1, 1, 1, 1)
        continues = (before[:, -1] == after[:, 0]).view(-1, 1, 1, 1)
        entering.append((state + (matrix @ entering[-1]).where(through, 0.0)).where(continues, 0.0))
    (torch.stack(entering) * given["weight"]).sum().backward()
    return [
        {"entering": entering[rank], "d_state": given["state"].grad[rank], "d_matrix": given["matrix"].grad[rank]}
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [3, 4])
def test_a_sharded_sequence_is_that_of_one_process(size: int):
    found = run_ranks(size, _on_ranks)
    for exchange, packed in CASES:
        for rank, expected in enumerate(one_process(size, packed)):
            assert_close(to_tensors(found[rank][exchange, packed]), expected, 1e-12)
