"""Decoding by one CUDA graph a token: the tokens of eager steps, and in bf16 their logits."""

import pytest
import torch

from megalin.generation import Sampling, cast_weights, generate_batches
from megalin.generation.decoder import Decoder, capture_cuda_graph, grows
from megalin.model.language_model import LanguageModel
from megalin.parallel.initialisation import init_weights
from tests.cases import CASES, VOCAB_SIZE, model

RAGGED = [[5, 17, 300, 2, 5, 9, 120], [3], list(range(21)), [9, 9]]
SAMPLED = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=3, repetition_penalty=1.3)
DECODERS = [case for case in CASES if case.representative]
WIDE = {
    kind: model(
        {"sublayers": [{"type": kind, "num_heads": 4}, {"type": "glu", "intermediate_size": 640}], "repeat": 4},
        hidden_size=512,
        init_std=0.02,
        embedding_scale=8.0,
    )
    for kind in ("transnormer", "hgrn2", "tnl", "cosformer2")
}


def build(config, dtype: torch.dtype) -> LanguageModel:
    built = LanguageModel(config)
    built.to_empty(device="cuda")
    init_weights(built, 0)
    cast_weights(built, dtype)
    return built.requires_grad_(False)


@pytest.mark.parametrize("case", DECODERS, ids=lambda case: case.name)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_graph_decodes_the_tokens_of_eager_steps_in_fp32(case, sampling):
    built = build(case.model, torch.float32)
    if grows(built):
        pytest.skip("a cache that grows has no graph")

    def tokens(batch_size, graph):
        options = {"sampling": sampling, "stop_ids": [7], "batch_size": batch_size, "graph": graph}
        return [completion.tokens for completion in generate_batches(built, RAGGED, max_tokens=80, **options)]

    expected = tokens(3, False)
    assert tokens(3, True) == expected
    assert tokens(1, True) == expected


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_logits_of_the_graph_are_those_of_the_forward_in_bf16(kind, batch, monkeypatch):
    """The first 64 tokens, decoded greedily by the graph, run through the plain forward as well."""
    built = build(WIDE[kind], torch.bfloat16)
    prompts = torch.randint(0, VOCAB_SIZE, (batch, 33), generator=torch.Generator().manual_seed(0)).tolist()
    kept = torch.zeros(64, batch, 384, device="cuda")
    choose = Decoder._choose

    def recording(self, logits):
        kept.index_copy_(0, recording.number, logits.float()[None])
        recording.number.add_(1)
        choose(self, logits)

    recording.number = torch.zeros(1, dtype=torch.int64, device="cuda")
    monkeypatch.setattr(Decoder, "_choose", recording)
    decoder = Decoder(built, Sampling(), batch_size=batch, capture=capture_cuda_graph)
    decoder.start(prompts, range(batch))
    tokens = torch.cat(list(decoder.blocks(64))).T.cuda()  # [B, 64]
    with torch.no_grad():
        truth = built(torch.cat([torch.tensor(prompts, device="cuda"), tokens], dim=1)).logits[:, 32:-1, :VOCAB_SIZE]
    found = kept.transpose(0, 1)[..., :VOCAB_SIZE]
    assert (found - truth.float()).norm() / truth.float().norm() < 2e-2
