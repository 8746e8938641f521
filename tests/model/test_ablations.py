"""The papers' ablation switches: against their definitions, decoded step by step, packed, and on meshes.

tests/verify/test_three_axes.py has several of them in one model on tp 2 x cp 3.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalin.errors import ConfigError
from megalin.generation.decoder import grows
from megalin.generation.generate import generate_batches
from megalin.generation.sampling import Sampling
from megalin.layers.mixers.base import MixerContext
from megalin.layers.mixers.hgrn2 import HGRN2
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.documents import find_documents
from megalin.parallel import sequence_documents
from megalin.parallel.config import ParallelConfig
from megalin.parallel.sequence_documents import DocumentView
from megalin.verify.case import make_case
from tests.ablations import LINEAR, MODELS, MOSAIC, RODIMUS_GATES, SOFTMAX
from tests.cases import (
    GLU,
    HIDDEN_SIZE,
    LENGTH,
    RODIMUS,
    VOCAB_SIZE,
    attention,
    build,
    make_inputs,
    model,
    reference,
    weighted_loss,
)
from tests.model.test_language_model import counted_flops, implementation_flops
from tests.numerics import assert_close, relative_error
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

BOUND = 1e-12

every_switch = pytest.mark.parametrize("name", MODELS)


@every_switch
def test_forward_and_all_gradients_equal_the_papers_definition(name: str):
    built, inputs = build(MODELS[name]), make_inputs()
    output = built(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    weighted_loss(output.token_losses).backward()
    weights = {key: p.detach().clone().requires_grad_() for key, p in built.named_parameters()}
    logits, losses = reference(MODELS[name], weights, inputs)
    weighted_loss(losses).backward()
    assert relative_error(output.logits[..., :VOCAB_SIZE], logits) <= BOUND
    expected = {key: weight.grad for key, weight in weights.items()}
    assert_close({key: p.grad for key, p in built.named_parameters()}, expected, BOUND)


@pytest.mark.parametrize("name", SOFTMAX)
def test_sequences_of_one_document_equal_the_papers_definition(name: str):
    """Other code than for packed documents: blocks become sequences of their own."""
    built, inputs = build(MODELS[name]), make_inputs()
    whole = inputs._replace(document_ids=torch.zeros_like(inputs.document_ids))
    logits, _ = reference(MODELS[name], dict(built.named_parameters()), whole)
    assert relative_error(built(inputs.tokens).logits[..., :VOCAB_SIZE], logits) <= BOUND


def test_the_host_reads_the_blocks_of_documents_once_a_batch():
    blocks = {"type": "softmax", "num_heads": 12, "block_size": 8}
    built, inputs = build(model({"sublayers": [blocks], "repeat": 3})), make_inputs()
    with patch.object(sequence_documents, "find_documents", wraps=find_documents) as reads:
        built(inputs.tokens, document_ids=inputs.document_ids)
    assert reads.call_count == 1


@pytest.mark.parametrize("name", ["sinks-groups", "blocks"])
def test_softmax_switches_generate_with_a_state_of_fixed_size(name: str):
    built = build(MODELS[name], dtype=torch.float32)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [300, 2]]
    assert not grows(built)
    batches = generate_batches(built, prompts, max_tokens=12, sampling=Sampling(temperature=0.0))
    for prompt, completion in zip(prompts, batches, strict=True):
        tokens = [*prompt, *completion.tokens]
        expected = built(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert completion.tokens == expected.tolist()


@pytest.mark.parametrize("name", [*LINEAR, *RODIMUS_GATES, "no-lower-bounds", "blocks"])
def test_flops_are_those_of_a_counted_forward(name: str):
    """Windows and sinks are left out: the CPU computes their masked pairs too."""
    built, batch, length = build(MODELS[name], dtype=torch.float32), 1, 80
    counted, scans = counted_flops(built, batch, length)
    assert batch * length * built.forward_flops(length) == counted - implementation_flops(built, batch, length, scans)


def test_sequences_beyond_a_learned_table_are_refused():
    built = build(_learned(max_positions=LENGTH - 1))
    with pytest.raises(ConfigError, match=r"model\.layers\.0: max_positions = 35, but a sequence has 36 tokens; use"):
        built(make_inputs().tokens)


def test_a_step_beyond_a_learned_table_is_nan():
    built, tokens = build(_learned(max_positions=8)), make_inputs().tokens
    output = built(tokens[:, :7], state=built.initial_state(len(tokens), dtype=torch.float64))
    last = built.step(tokens[:, 7], output.state)
    assert last.logits[..., :VOCAB_SIZE].isfinite().all()
    assert built.step(tokens[:, 8], last.state).logits[..., :VOCAB_SIZE].isnan().all()


def test_sinusoidal_positions_need_an_even_width():
    odd = attention("transnormer", num_heads=1, absolute_positions="sinusoidal")
    with pytest.raises(ConfigError, match=r"but model\.hidden_size = 47 is odd; use an even width"):
        LanguageModel(model({"sublayers": [odd]}, hidden_size=47))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LINEAR["sinusoidal"], LINEAR["learned"]),
        (LINEAR["sinusoidal"], attention("transnormer", absolute_positions="sinusoidal")),
        (LINEAR["learned"], LINEAR["learned"] | {"max_positions": 91}),
    ],
    ids=["kinds", "types", "rows"],
)
def test_absolute_positions_of_two_kinds_are_refused(first: dict[str, Any], second: dict[str, Any]):
    lines = r'(?s)layers\.0\.sublayers\.1: absolute_positions = "\w+".*layers\.1\.sublayers\.0: absolute_positions = '
    remedy = ".*added once, to the embedded tokens: give the same keys to sub-layers of one type"
    with pytest.raises(ConfigError, match=lines + remedy):
        model({"sublayers": [GLU, first]}, {"sublayers": [second]})


def test_sub_layers_of_a_type_share_absolute_positions_and_may_lack_them():
    built = LanguageModel(model({"sublayers": [LINEAR["learned"], attention("transnormer"), LINEAR["learned"]]}))
    assert len(built.input_mixers()) == 1


def _learned(max_positions: int) -> ModelConfig:
    positions = {"absolute_positions": "learned", "max_positions": max_positions}
    return model({"sublayers": [attention("transnormer", **positions)]})


def test_hgrn2_with_heads_of_one_channel_is_the_real_hgrn():
    """Eq. 1 and 2 of the HGRN2 paper, channel by channel."""
    (mixer,) = (mixer for mixer in build(MODELS["hgrn1"]).mixers() if isinstance(mixer, HGRN2))
    x = torch.randn(1, 9, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    beta = torch.full((HIDDEN_SIZE,), 0.5, dtype=torch.float64)  # of the second block of two
    documents = DocumentView(None)
    found = mixer(x, MixerContext(torch.arange(9), documents, x.dtype, (beta,), True), None).y
    output_gate, logit, value = (x[0] @ weight.T for weight in mixer.qfv.weight)
    h, rows = torch.zeros(HIDDEN_SIZE, dtype=x.dtype), []
    for o, g, i in zip(torch.nn.functional.silu(output_gate), torch.sigmoid(logit), value, strict=True):
        f = beta + (1.0 - beta) * g
        h = f * h + (1.0 - f) * i
        rows.append(o * h)
    y = torch.stack(rows)
    normed = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert relative_error(found[0], normed @ mixer.out.weight.T) <= BOUND


def test_without_lower_bounds_there_are_no_parameters_of_them():
    names = [name for name, _ in build(MODELS["no-lower-bounds"]).named_parameters()]
    assert not any("gamma" in name for name in names)
    assert "shared.hgrn2.rows.gamma" in dict(build(MODELS["no-lower-bounds-at-first"]).named_parameters())


@every_switch
def test_prompts_and_steps_equal_the_forward(name: str):
    """A prompt of several documents in two parts, then token by token."""
    built, inputs = build(MODELS[name]), make_inputs()
    tokens, documents = inputs.tokens, inputs.document_ids.clone()
    steps = 21
    documents[:, steps:] = documents[:, steps : steps + 1]  # decoding stays in one document
    with torch.no_grad():
        expected = built(tokens, document_ids=documents).logits
        state, logits = built.initial_state(len(tokens), dtype=torch.float64), []
        for part in (slice(0, 9), slice(9, steps + 1)):
            output = built(tokens[:, part], document_ids=documents[:, part], state=state)
            state = output.state
            logits.append(output.logits)
        for t in range(steps + 1, LENGTH):
            output = built.step(tokens[:, t], state)
            state = output.state
            logits.append(output.logits)
    assert relative_error(torch.cat(logits, dim=1)[..., :VOCAB_SIZE], expected[..., :VOCAB_SIZE]) <= BOUND


def _differences(models: list[ModelConfig], axes: dict[str, Any], data_size: int) -> list[str]:
    options: dict[str, Any] = {"dtype": "float64", "full": True, "length": LENGTH, "recompute": False}
    cases = [make_case(config, ParallelConfig(**axes), data_size=data_size, **options) for config in models]
    world_size = data_size * axes.get("tp", 1) * axes.get("cp", 1) * axes.get("pp", 1)
    found = run_ranks(world_size, verify_all, cases)[0]
    assert all(errors for errors in found)
    return [f"{place}: {error}" for place, errors in enumerate(found) for error in errors if not error.passed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "data_size"),
    [({"tp": 2, "sequence_parallel": True}, 2), ({"tp": 2, "cp": 3}, 1), ({"tp": 4}, 1), ({"cp": 4}, 1)],
    ids=["tp2 sequence parallel dp2", "tp2 cp3", "tp4", "cp4"],
)
def test_every_switch_agrees_with_one_process(axes: dict[str, Any], data_size: int):
    """Losses, all gradients, and the weights after a step."""
    assert _differences(list(MODELS.values()), axes, data_size) == []


@pytest.mark.slow
def test_switches_together_agree_with_one_process_on_two_pipeline_stages():
    """Positions are added on the first stage; shared lower bounds may be on one of them alone."""
    assert _differences([MOSAIC, MODELS["no-lower-bounds-at-first"]], {"pp": 2}, 1) == []


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (
            attention("tnl", gate="none", gate_input="residual", absolute_positions="learned"),
            r'(?s)"learned" needs max_positions.*gate_input = "residual" has no meaning with gate = "none"',
        ),
        (
            attention("transnormer", absolute_positions="sinusoidal", max_positions=5),
            r'max_positions = 5 has no meaning without absolute_positions = "learned"; leave it out',
        ),
        (
            RODIMUS | {"gates": ["temperature", "temperature"]},
            r'(?s)names a gate twice.*"temperature", which tempers.*input_gate_rank = 5 has no meaning without "input"',
        ),
        (
            {"type": "softmax", "num_heads": 12, "window": 4, "block_size": 4},
            r"window = 4 and block_size = 4 are two choices of visible tokens; give one",
        ),
        (
            {"type": "softmax", "num_heads": 12, "head_dim": 5, "num_sinks": 2, "backend": "flash_attn"},
            r'(?s)head_dim = 5 is odd.* use 6.*num_sinks = 2 needs a window.*backend = "flash_attn" takes no num_sinks',
        ),
    ],
)
def test_switches_that_contradict_each_other_are_refused(mixer: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        model({"sublayers": [mixer]})
