"""Scores of requests: packed documents on any mesh, and carried states, against each request alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from megalin.evaluation import forward_groups
from megalin.evaluation.choices import carried_state, partial, scoring
from megalin.evaluation.choices.encoding import EncodedRequest
from megalin.evaluation.choices.metrics import RequestScores
from megalin.evaluation.choices.partial import PartialScores
from megalin.evaluation.choices.rows import RequestRows
from megalin.evaluation.choices.scoring import score_carried, score_packed
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel import embedding
from megalin.parallel.config import ParallelConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from tests.cases import CASES, HIDDEN_SIZE, HYBRID, LENGTH, VOCAB_SIZE, Case, build
from tests.model_runs import CPU
from tests.ranks import run_ranks

SIZES = [(1, 1), (1, 4), (5, 1), (5, 3), (5, 9), (20, 2), (33, 3), (36, 1), (2, 35), (3, 2)]
"""Tokens of prompt and answer. Those of 5 share their prompt; 37 ids fill a row."""
MICRO_BATCH_SIZE = 2


def _requests(seed: int = 5) -> list[EncodedRequest]:
    generator = np.random.default_rng(seed)
    prompts: dict[int, list[int]] = {}
    made = []
    for prompt, answer in SIZES:
        context = prompts.setdefault(prompt, generator.integers(0, VOCAB_SIZE, prompt).tolist())
        made.append(EncodedRequest(context + generator.integers(0, VOCAB_SIZE, answer).tolist(), answer))
    return made


def _alone(config: ModelConfig, requests: list[EncodedRequest]) -> RequestScores:
    return scores_alone(build(config), requests, VOCAB_SIZE)


@torch.no_grad()
def scores_alone(model: LanguageModel, requests: list[EncodedRequest], vocab_size: int) -> RequestScores:
    """Each request as the only sequence of a plain forward."""
    nats, greedy = [], []
    for ids, answer in requests:
        logits = model(torch.tensor([list(ids)])).logits[0, -answer - 1 : -1, :vocab_size]
        right = torch.tensor(list(ids[-answer:]))
        nats.append(logits.log_softmax(-1).gather(-1, right[:, None]).sum().item())
        greedy.append(int((logits.argmax(-1) == right).sum()))
    return RequestScores(
        np.array(nats), np.array(greedy), np.array([request.num_answer_tokens for request in requests])
    )


def _greedy_requests(config: ModelConfig) -> list[EncodedRequest]:
    """The requests, and a copy of some with the model's own greedy answers."""
    model, requests = build(config), _requests()
    copies = []
    with torch.no_grad():
        for ids, answer in requests[3:6]:
            text = ids[:-answer]
            for _ in range(answer):
                text = [*text, int(model(torch.tensor([text])).logits[0, -1, :VOCAB_SIZE].argmax())]
            copies.append(EncodedRequest(text, answer))
    return requests + copies


def _on_mesh(config: ModelConfig, axes: dict[str, Any], requests: list[EncodedRequest], carried: bool) -> RequestScores:
    mesh = Mesh(ParallelConfig(**axes), CPU)
    model: Any = build_model(
        config, mesh, compute_dtype=torch.float64, recompute=False, compile_blocks=False, seed=0, length=LENGTH
    )
    if carried:
        return score_carried(model, requests, mesh)
    shape = {"micro_batch_size": MICRO_BATCH_SIZE, "sequence_length": LENGTH}
    scores = score_packed(model, requests, mesh, **shape)
    assert model.training
    for parameter in model.parameters():  # gathered ones have no data axis
        assert isinstance(parameter, DTensor)
        assert "shard" in (parameter.device_mesh.mesh_dim_names or ())
    return scores


def _assert_equal(scores: RequestScores, expected: RequestScores) -> None:
    np.testing.assert_allclose(scores.log_probabilities, expected.log_probabilities, rtol=1e-10, atol=0)
    np.testing.assert_array_equal(scores.num_greedy, expected.num_greedy)
    np.testing.assert_array_equal(scores.greedy, expected.greedy)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.representative else pytest.mark.slow) for case in CASES],
)
def test_packed_and_carried_scores_are_those_of_each_request_alone(case: Case):
    requests = _greedy_requests(case.model)
    expected = _alone(case.model, requests)
    assert expected.greedy.any()
    assert not expected.greedy.all()
    with process_group(CPU), patch.object(embedding, "_SCORED_TOKENS", 7):
        _assert_equal(_on_mesh(case.model, {}, requests, carried=False), expected)
        _assert_equal(_on_mesh(case.model, {}, requests, carried=True), expected)


MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, {}],
    3: [{"cp": 3}],
    4: [{"tp": 2, "cp": 2}, {"pp": 2}],
}
"""Meshes by their number of ranks; the rest of the ranks divides the samples."""


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_packed_scores_are_the_same_on_every_mesh(world_size):
    _check_meshes([HYBRID], world_size, MESHES[world_size])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_packed_scores_of_every_mixer_are_the_same_on_every_mesh(world_size):
    more = {
        2: [{"tp": 2}, {"cp": 2}],
        3: [{}, {"tp": 3}],
        4: [{"cp": 4}, {"tp": 4}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"zero": 1}],
    }
    cases = [case for case in CASES if case.representative or case.name == "softmax"]
    _check_meshes(cases, world_size, MESHES[world_size] + more[world_size])


@pytest.mark.slow
def test_packed_scores_of_interleaved_stages_are_the_same():
    _check_meshes([HYBRID], 2, [{"pp": 2, "pp_schedule": "interleaved", "pp_stages_per_rank": 2}])


def _carried(config: ModelConfig, meshes: list[dict[str, Any]], requests: list[EncodedRequest]) -> list[RequestScores]:
    """The carried scores on each mesh; every data-parallel rank has the whole model."""
    scores = []
    for axes in meshes:
        mesh = Mesh(ParallelConfig(**axes), CPU)
        model = LanguageModel(config, mesh.tp).to(torch.float64)
        model.to_empty(device=CPU)
        init_weights(model, 0)
        scores.append(score_carried(model, requests, mesh))
    return scores


def test_carried_scores_are_the_same_under_tensor_and_data_parallelism():
    requests = _greedy_requests(HYBRID.model)
    for of_rank in run_ranks(2, _carried, HYBRID.model, [{"tp": 2}, {}], requests):
        for scores in of_rank:
            _assert_equal(scores, _alone(HYBRID.model, requests))


def _check_meshes(cases: list[Case], world_size: int, meshes: list[dict[str, Any]]) -> None:
    requests = [_greedy_requests(case.model) for case in cases]
    results = run_ranks(world_size, _on_meshes, [case.model for case in cases], meshes, requests)
    for case, own, *of_ranks in zip(cases, requests, *results, strict=True):
        expected = _alone(case.model, own)
        for of_meshes in of_ranks:
            for scores in of_meshes:
                _assert_equal(scores, expected)


def _on_meshes(
    models: list[ModelConfig], meshes: list[dict[str, Any]], requests: list[list[EncodedRequest]]
) -> list[list[RequestScores]]:
    """The packed scores of each model on each mesh."""
    return [[_on_mesh(model, axes, own, False) for axes in meshes] for model, own in zip(models, requests, strict=True)]


FAULTS = {
    "wrong index": (RequestRows, "request_numbers", lambda old: lambda *args: old(*args).roll(1, 1)),
    "last token dropped": (RequestRows, "batch", lambda old: lambda *args: _without_last_label(old(*args))),
    "documents not isolated": (RequestRows, "batch", lambda old: lambda *args: _as_one_document(old(*args))),
    "state of another prompt": (carried_state, "_copies", lambda old: lambda state, rows: old(state, rows.roll(1))),
    "no state": (
        carried_state,
        "_prompt_state",
        lambda old: lambda model, prompts, device: model.initial_state(len(prompts), dtype=torch.float64),
    ),
    "batch counted twice": (scoring._Sums, "add", lambda old: lambda *args: (old(*args), old(*args))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault):
    config, requests = CASES[0].model, _requests()
    expected = _alone(config, requests)
    owner, name, plant = FAULTS[fault]
    with process_group(CPU), patch.object(owner, name, plant(getattr(owner, name))), pytest.raises(AssertionError):
        _assert_both_equal(config, requests, expected)


def _assert_both_equal(config, requests, expected):
    for carried in (False, True):
        _assert_equal(_on_mesh(config, {}, requests, carried), expected)


def _without_last_label(batch):
    last = (batch.labels[:, 1:] == IGNORED_LABEL) & (batch.labels[:, :-1] != IGNORED_LABEL)
    batch.labels[:, :-1][last] = IGNORED_LABEL
    return batch


def _as_one_document(batch):
    batch.document_ids.zero_()
    return batch


def test_rows_hold_every_request_once_with_its_answer_alone_labelled():
    requests = _requests() * 30
    rows = RequestRows(requests, sequence_length=LENGTH)
    samples = np.arange(rows.num_samples)
    batch, numbers = rows.batch(samples), rows.request_numbers(torch.from_numpy(samples))
    assert batch.tokens.shape == (rows.num_samples, LENGTH)
    for number, (ids, answer) in enumerate(requests):
        own = (numbers == number) & (batch.labels != IGNORED_LABEL)
        assert own.any(1).sum() == 1
        row, document = int(own.any(1).nonzero()), int(batch.document_ids[own][0])
        assert (batch.document_ids[row] == document).sum() == len(ids) - 1  # padding is another document
        assert batch.labels[own].tolist() == ids[-answer:]
        assert batch.tokens[own].tolist() == ids[-answer - 1 : -1]
    # 30 x 174 tokens in samples of 36, with at most a sample left over for each request that fits no other.
    assert rows.num_samples < 1.1 * 30 * sum(len(ids) - 1 for ids, _ in _requests()) / LENGTH + 1
    assert (batch.document_ids.diff() >= 0).all()
    # The batch of a rank without samples has no label and any number.
    assert not rows.request_numbers(torch.tensor([-1])).any()


def test_copies_of_a_softmax_cache_are_bounded_by_its_length():
    """The cache of the 5 ids of the prompt has 4 tokens, in each of two layers their fp64 keys, values and a flag."""
    config = next(case.model for case in CASES if case.name == "softmax")
    requests = [EncodedRequest([1, 2, 3, 4, 5, answer], 1) for answer in range(7)]
    copies = Mock(wraps=carried_state._copies)
    cache_bytes = 4 * 2 * (2 * HIDDEN_SIZE + 1) * 8
    with (
        process_group(CPU),
        patch.object(carried_state, "_copies", copies),
        patch.object(forward_groups, "_STATES_BYTES", 3 * cache_bytes + 1),
    ):
        _assert_equal(_on_mesh(config, {}, requests, True), _alone(config, requests))
    assert [len(call.args[1]) for call in copies.call_args_list] == [3, 3, 1]


@pytest.mark.parametrize(("tokens", "state_bytes"), [(1, 1 << 40), (60, 1 << 40), (1 << 20, 1)])
def test_carried_scores_do_not_depend_on_the_batches(tokens, state_bytes):
    config, requests = CASES[0].model, _requests()
    limits = {"_TOKENS_AT_ONCE": tokens, "_STATES_BYTES": state_bytes}
    with process_group(CPU), patch.multiple(forward_groups, **limits):
        _assert_equal(_on_mesh(config, {}, requests, True), _alone(config, requests))


class Killed(BaseException):
    pass


@contextmanager
def often() -> Iterator[None]:
    """Sums after every second batch, each of which is written; prompts in small groups."""
    with (
        patch.object(scoring, "EVERY_BATCHES", 2),
        patch.object(partial, "_EVERY_SECONDS", 0.0),
        patch.object(forward_groups, "_TOKENS_AT_ONCE", 150),
    ):
        yield


@contextmanager
def killed(after: int | None) -> Iterator[list[int]]:
    """Kills the evaluation at the end of batch `after` of its own, before it is counted; the list has the batches."""
    ended, real = [], scoring._Sums.end_batch

    def end_batch(sums: Any) -> None:
        ended.append(sums.batches + 1)
        if len(ended) == after:
            raise Killed
        real(sums)

    with patch.object(scoring._Sums, "end_batch", end_batch):
        yield ended


def _scores_of_killed(folder: Path, axes: dict[str, Any], carried: bool) -> tuple[list[RequestScores], list[list[int]]]:
    """Scores without a file, and of an evaluation that was killed twice; and the batches of each part."""
    mesh, requests = Mesh(ParallelConfig(**axes), CPU), [request for seed in range(5) for request in _requests(seed)]
    model: Any = build_model(
        HYBRID.model, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0, length=LENGTH
    )

    def score(kept: PartialScores | None) -> RequestScores:
        if carried:
            return score_carried(model, requests, mesh, partial=kept)
        return score_packed(
            model, requests, mesh, micro_batch_size=MICRO_BATCH_SIZE, sequence_length=LENGTH, partial=kept
        )

    scores, batches = [], []
    for after, kept in ((None, False), (4, True), (2, True), (None, True)):
        with often(), killed(after) as ended, suppress(Killed):
            scores.append(score(PartialScores(folder / "x.partial.json", {"task": 1}) if kept else None))
        batches.append(ended)
    return scores, batches


@pytest.mark.parametrize(
    ("world_size", "axes", "carried"),
    [
        (1, {}, True),
        (3, {"cp": 3}, False),
        *(pytest.param(*case, False, marks=pytest.mark.slow) for case in ((2, {}), (2, {"pp": 2}), (4, {"tp": 2}))),
    ],
)
def test_killed_scores_go_on_bit_for_bit(tmp_path, world_size, axes, carried):
    results = run_ranks(world_size, _scores_of_killed, tmp_path, axes, carried)
    for (expected, found), (whole, first, second, last) in results:
        assert first == [1, 2, 3, 4]
        assert second == [3, 4]  # the sums of two batches were there
        assert last == whole[2:]
        assert len(whole) > 4
        for values, others in zip(expected, found, strict=True):
            np.testing.assert_array_equal(values, others)
