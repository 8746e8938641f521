"""Encoders on ranks: packed documents, compiled blocks, and weights saved on one mesh and loaded on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import weights
from megalin.data.batch import EncoderBatch, split_tokens, take_samples
from megalin.model.encoder import Encoder
from megalin.parallel.cross_entropy import vocab_parallel_argmax
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.tensor_parallel import full_tensor
from tests.encoder_cases import CASES, LENGTH, Case, build, make_batch
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, materialise, to_arrays, to_tensors
from tests.ranks import run_ranks

PLACES = torch.arange(LENGTH)
DOCUMENTS = torch.stack(
    [(PLACES >= 12).int() + (PLACES >= 25), (PLACES >= 11).int() + (PLACES >= 29), PLACES // 9, PLACES // 9]
)
"""Document ids by sequence, for three ranks. Starts: at a rank's first token and one after it; one before it, with one
document on all three ranks; inside each shard."""
PACKED = [case for case in CASES if not case.name.startswith("classes")]
"""Every mixer."""


def _model(
    case: Case,
    tp: int,
    *,
    cp: int = 1,
    sequence_parallel: bool = False,
    dtype=torch.float32,
    backend: str | None = None,
):
    mesh = make_mesh(tp, cp=cp, sequence_parallel=sequence_parallel)
    model = Encoder(case.model, mesh.tp, cp=mesh.cp).to(dtype)
    if backend is not None:
        for block in model.block_list():
            block.compile(fullgraph=True, dynamic=False, backend=backend)
    shard_model(model, model.block_list(), model.full_precision_modules(), mesh, compute_dtype=dtype, head=model.head)
    materialise(model)
    return model, mesh


def _results(model: Encoder, batch: EncoderBatch, documents: Tensor | None) -> dict[str, Tensor]:
    output = model(**batch.inputs(), document_ids=documents)
    sums = output.loss_sums()
    sums.sum().backward()
    return {"sums": sums.detach()} | {name: full_tensor(p.grad) for name, p in model.named_parameters()}


def _packed(tp: int, cp: int) -> list[Arrays]:
    found = []
    for sequence_parallel in (False, True)[:tp]:
        for case in PACKED:
            model, mesh = _model(case, tp, cp=cp, sequence_parallel=sequence_parallel, dtype=torch.float64)
            num_samples = 4 // mesh.samples.size
            rows = slice(num_samples * mesh.samples.rank, num_samples * (mesh.samples.rank + 1))
            batch = split_tokens(take_samples(make_batch(case.model), rows), mesh.cp)
            results = _results(model, batch, mesh.cp.shard(DOCUMENTS[rows]))
            results["sums"] = mesh.sum_over_data(results["sums"])
            found.append(to_arrays(results))
    return found


@pytest.mark.parametrize(
    ("world_size", "tp", "cp"),
    [
        (3, 1, 3),
        *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((4, 2, 2), (2, 2, 1), (4, 2, 1), (4, 4, 1))),
    ],
)
def test_packed_documents_on_meshes_equal_one_process(world_size: int, tp: int, cp: int):
    expected = [_results(build(case.model), make_batch(case.model), DOCUMENTS) for case in PACKED]
    for rank in run_ranks(world_size, _packed, tp, cp):
        for found, truth in zip(rank, expected * min(tp, 2), strict=True):
            assert_close(to_tensors(found), truth, 1e-11)


def _second_documents(cp: int) -> list[list[Arrays]]:
    """Hidden states of the other documents, and their gradients, by case, for two contents of each first document."""
    found = []
    for case in PACKED:
        model, mesh = _model(case, 1, cp=cp, dtype=torch.float64)
        batch, pair = make_batch(case.model), []
        for shift in (0, 7):
            first = DOCUMENTS == 0
            tokens = torch.where(first, (batch.tokens + shift) % case.model.vocab_size, batch.tokens)
            own, others = mesh.cp.shard(tokens), mesh.cp.shard(~first)
            hidden = model(own, valid=mesh.cp.shard(batch.valid), document_ids=mesh.cp.shard(DOCUMENTS)).hidden
            (hidden * others[..., None]).square().sum().backward()
            tensors = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            pair.append(to_arrays(tensors | {"hidden": hidden[others]}))
            model.zero_grad(set_to_none=True)
        found.append(pair)
    return found


def test_another_document_does_not_move_a_bit_across_ranks():
    for rank in run_ranks(3, _second_documents, 3):
        for case, (one, other) in zip(PACKED, rank, strict=True):
            assert len(one) > 5
            for key in one:
                assert (one[key] == other[key]).all(), (case.name, key)


def _compiled(sequence_parallel: bool) -> list[tuple[Arrays, Arrays, int]]:
    found = []
    for case in CASES[:2]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        batch = make_batch(case.model)
        pair = [
            to_arrays(_results(_model(case, 2, sequence_parallel=sequence_parallel, backend=backend)[0], batch, None))
            for backend in (None, "aot_eager")
        ]
        found.append((pair[0], pair[1], torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.slow  # decoders have the same in the fast set
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_blocks_have_the_gradients_of_eager_ones(sequence_parallel: bool):
    """One graph serves every block of a kind."""
    for results in run_ranks(2, _compiled, sequence_parallel, timeout=250.0):
        for eager, compiled, num_graphs in results:
            assert num_graphs > 0
            assert_close(to_tensors(compiled), to_tensors(eager), 2e-5)


def _save(folder: str, tp: int) -> None:
    for case in CASES:
        save(Path(folder) / case.name, step=1, tensors=weights(_model(case, tp)[0]), state={})


def _load(folder: str, tp: int) -> list[str]:
    """Names of tensors, and of cases with ratios, that differ after loading."""
    different = []
    for case in CASES:
        model, _ = _model(case, tp)
        expected = {name: full_tensor(tensor.detach()).clone() for name, tensor in weights(model).items()}
        ratios = [buffer.clone() for buffer in model.buffers()]
        for tensor in [*weights(model).values(), *model.buffers()]:
            torch.nn.init.constant_(tensor.to_local() if hasattr(tensor, "to_local") else tensor, float("nan"))
        checkpoint = newest(Path(folder) / case.name)
        assert checkpoint is not None
        load(checkpoint, weights(model))
        model.after_optimizer_step()
        for name, tensor in weights(model).items():
            if not torch.equal(full_tensor(tensor.detach()), expected[name]):
                different.append(f"{case.name}: {name}")
        if not all(torch.equal(a, b) for a, b in zip(ratios, model.buffers(), strict=True)):
            different.append(f"{case.name}: a ratio")
    return different


@pytest.mark.parametrize("meshes", [[(3, 1)], pytest.param([(1, 1), (2, 1), (4, 4)], marks=pytest.mark.slow)], ids=str)
def test_saved_on_one_mesh_loads_on_another(tmp_path, meshes):
    run_ranks(2, _save, str(tmp_path), 2)
    for world_size, tp in meshes:
        assert run_ranks(world_size, _load, str(tmp_path), tp) == [[]] * world_size, (world_size, tp)


def _argmax() -> bool:
    mesh = make_mesh(4)
    logits = torch.randint(0, 6, (5, 7, 32), generator=torch.Generator().manual_seed(1)).float()
    mine = logits.chunk(4, -1)[mesh.tp.axis.rank]
    return torch.equal(vocab_parallel_argmax(mine, mesh.tp.axis), logits.argmax(-1))


def test_likeliest_id_is_found_over_the_ranks_and_ties_go_to_the_smallest():
    assert run_ranks(4, _argmax) == [True] * 4
