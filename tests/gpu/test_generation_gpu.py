"""Decoding by one CUDA graph a token: the tokens of eager steps, and in bf16 their logits."""

import pytest
import torch

from megalin.generation import Sampling, cast_weights, generate_batches
from megalin.generation.decoder import Decoder, capture_cuda_graph
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
    for kind in ("transnormer", "hgrn2", "tnl", "cosformer2", "softmax")
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

    def tokens(batch_size, graph):
        options = {"sampling": sampling, "stop_ids": [7], "batch_size": batch_size, "graph": graph}
        return [completion.tokens for completion in generate_batches(built, RAGGED, max_tokens=80, **options)]

    expected = tokens(3, False)
    assert tokens(3, True) == expected
    assert tokens(1, True) == expected


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_logits_of_the_graph_are_those_of_eager_steps_in_bf16(kind, batch, monkeypatch):
    """The first 64 tokens, decoded greedily by the graph, run again in eager steps, and in the plain forward in bf16
    and fp32: the graph's error is at most twice that of the forward in its dtype."""
    built, wide = build(WIDE[kind], torch.bfloat16), build(WIDE[kind], torch.float32)
    prompts = torch.randint(0, VOCAB_SIZE, (batch, 33), generator=torch.Generator().manual_seed(0))
    found = torch.zeros(64, batch, 384, device="cuda")
    choose, number = Decoder._choose, torch.zeros(1, dtype=torch.int64, device="cuda")

    def recording(self, logits):
        found.index_copy_(0, number, logits.float()[None])
        number.add_(1)
        choose(self, logits)

    monkeypatch.setattr(Decoder, "_choose", recording)
    decoder = Decoder(built, Sampling(), batch_size=batch, max_length=33 + 64, capture=capture_cuda_graph)
    decoder.start(prompts.tolist(), range(batch))
    text = torch.cat([prompts, torch.cat(list(decoder.blocks(64))).T], dim=1).cuda()  # [B, 97]
    with torch.no_grad():
        output = built(text[:, :33], state=built.initial_state(batch), losses="last")
        eager = [output.logits]
        for place in range(33, 96):
            output = built.step(text[:, place], output.state)
            eager.append(output.logits)
        low, truth = (each(text).logits[:, 32:-1, :VOCAB_SIZE].float() for each in (built, wide))
    found, eager = found.transpose(0, 1)[..., :VOCAB_SIZE], torch.cat(eager, dim=1)[..., :VOCAB_SIZE].float()
    assert (found - eager).norm() / eager.norm() < 2e-2
    assert (found - truth).norm() <= 2 * (low - truth).norm()
