"""Packed documents under context parallelism: other documents change no bit of one, wherever they start."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from megalin.data.batch import Batch, split_tokens
from megalin.parallel.config import ExchangeName, ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.train.build import build_model
from tests.cases import CASES, GLU, REPRESENTATIVES, RODIMUS, SHARED_KEY, VOCAB_SIZE, Case, model
from tests.ranks import run_ranks
from tests.verify.meshes import joined

CP, LENGTH = 3, 36
STARTS = [(), (12,), (12, 24), (11, 13, 25), (1, 2, 3, 35), (12, 13, 23, 24), tuple(range(1, LENGTH)), (5, 30)]
"""Document starts by sequence: at, before and after a rank's first token, at every token, and on several ranks."""
SHARED_KEYS = [
    Case(f"window of {window}", model({"sublayers": [RODIMUS, SHARED_KEY | {"window": window}, GLU], "repeat": 2}))
    for window in (1, 30)
]
ALONE = {case.name: case.model for case in (*CASES, *SHARED_KEYS) if case.name != "sockets"}
"""Models; `sockets` needs the full sequence."""
MODELS = ALONE | {
    case.name: case.model
    for case in (
        joined("every mixer", REPRESENTATIVES, num_blocks=3),
        joined("every mixer and window", [*REPRESENTATIVES, *SHARED_KEYS], num_blocks=3),
    )
}
WAYS: list[tuple[int, torch.dtype, ExchangeName]] = [
    (1, torch.float32, "auto"),
    (CP, torch.bfloat16, "ring"),
    (CP, torch.float32, "all_gather"),
]


def sequences(changed: int | None) -> tuple[Batch, Tensor]:
    """The sequences, with other tokens in each second document from `changed` on, and the mask of these tokens."""
    generator = torch.Generator().manual_seed(5)
    starts = torch.zeros(len(STARTS), LENGTH, dtype=torch.int32)
    for row, places in enumerate(STARTS):
        starts[row, list(places)] = 1
    ids = starts.cumsum(1, dtype=torch.int32)
    tokens, labels, others = (torch.randint(0, VOCAB_SIZE, ids.shape, generator=generator) for _ in range(3))
    other = torch.zeros_like(ids, dtype=torch.bool) if changed is None else ids % 2 == changed
    return Batch(torch.where(other, others, tokens), labels, ids, torch.arange(len(ids))), other


def changed_elements(names: list[str], cp: int, dtype: torch.dtype, exchange: ExchangeName) -> dict[str, int]:
    """Number of elements that changed in documents with unchanged tokens, by model and tensor."""
    mesh = Mesh(ParallelConfig(cp=cp, cp_exchange=exchange), torch.device("cpu"))
    found: dict[str, int] = {}
    for name in names:
        built = build_model(MODELS[name], mesh, compute_dtype=dtype, recompute=False, compile_blocks=False, seed=0)
        embed, kept = built.embedding.embed, {}

        def keep(tokens: Tensor, embed=embed, kept=kept) -> Tensor:
            kept["embedded"] = embed(tokens)
            kept["embedded"].retain_grad()
            return kept["embedded"]

        built.embedding.embed = keep
        expected: dict[str, Tensor] = {}
        for changed in (None, 0, 1):
            whole, other = sequences(changed)
            batch = split_tokens(whole, mesh.cp)
            output = built(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
            output.token_losses.sum().backward()
            results = {"logits": output.logits, "losses": output.token_losses, "gradient": kept["embedded"].grad}
            expected = expected or {what: tensor.detach().clone() for what, tensor in results.items()}
            same = ~mesh.cp.shard(other)
            for what, tensor in results.items():
                count = int((tensor != expected[what])[same].sum())
                found[f"{name}, {what}"] = found.get(f"{name}, {what}", 0) + count
            assert changed is None or not torch.equal(results["logits"], expected["logits"])
            built.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("names", "cp", "dtype", "exchange"),
    [
        pytest.param(ALONE, *WAYS[0], id="every case on one rank"),
        pytest.param(["every mixer"], *WAYS[1], id="ring"),
        pytest.param(["every mixer and window"], *WAYS[2], id="all-gather"),
        pytest.param([case.name for case in REPRESENTATIVES], *WAYS[1], id="every mixer alone", marks=pytest.mark.slow),
        pytest.param(ALONE, *WAYS[2], id="every case", marks=pytest.mark.slow),
    ],
)
def test_other_documents_move_no_bit(names: Iterable[str], cp: int, dtype: torch.dtype, exchange: ExchangeName):
    """Compares logits, losses, and the gradients of all losses with respect to embedded tokens."""
    names = list(names)
    for found in run_ranks(cp, changed_elements, names, cp, dtype, exchange, timeout=200.0):
        assert {what: count for what, count in found.items() if count} == {}
