"""Every case of tests/encoder_cases.py: the definition, padding, packed documents, counts and learning."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megalin.config import parse
from megalin.data.batch import take_samples
from megalin.errors import ConfigError
from megalin.layers.mixer_configs.hgrn2 import HGRN2Config
from megalin.layers.mixer_configs.two_way_hgrn2 import TwoWayHGRN2Config
from megalin.layers.mixers.base import BuildContext, MixerContext
from megalin.model.config import EncoderConfig, parse_model
from megalin.model.encoder import Encoder, EncoderOutput
from megalin.model.presets import load_preset
from megalin.parallel.sequence_documents import DocumentView
from megalin.parallel.tensor_parallel import TensorParallel
from tests.encoder_cases import (
    CASES,
    LENGTH,
    NAMES,
    ROTARY,
    SIZES,
    SOFTMAX,
    VOCAB_SIZE,
    Case,
    build,
    make_batch,
    model,
    reference,
    weighted_loss,
)
from tests.numerics import assert_close

BOUND = 1e-12
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)


def test_sinusoidal_positions_need_an_even_width():
    with pytest.raises(ConfigError, match=r'"sinusoidal" has as many sines as cosines, but hidden_size = 47 is odd'):
        model({"type": "dense_attention", "num_heads": 1}, hidden_size=47, position_embedding="sinusoidal")


def tensors(output: EncoderOutput) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in output._asdict().items() if tensor is not None}
    if output.masked_logits is not None:
        found["masked_logits"] = output.masked_logits[..., :VOCAB_SIZE]
    return found


def losses(found: dict[str, Tensor]) -> list[Tensor]:
    return [found[name] for name in ("masked_losses", "sequence_losses") if name in found]


def gradients(model: Encoder) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


DOCUMENTS = (torch.arange(LENGTH) // 9).expand(4, LENGTH)
"""Packed sequences of four documents of nine tokens; the padding of some is part of a document, or all of one."""


@every_case
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "packed"])
def test_forward_and_all_gradients_equal_the_definition(case: Case, documents: Tensor | None):
    model, batch = build(case.model), make_batch(case.model)
    found = tensors(model(**batch.inputs(), document_ids=documents))
    weighted_loss(losses(found)).backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference(case.model, weights, batch, documents)
    weighted_loss(losses(expected)).backward()
    assert_close(found, expected, BOUND)
    assert_close(gradients(model), {name: weight.grad for name, weight in weights.items()}, 1e-11)


@every_case
def test_every_weight_changes_the_loss(case: Case):
    model, batch = build(case.model), make_batch(case.model)
    model(**batch.inputs()).loss_sums().sum().backward()
    for name, gradient in gradients(model).items():
        assert gradient.norm() > 1e-4, name


@every_case
def test_padding_moves_nothing_else(case: Case):
    """Neither the tokens nor the types of padding change a bit elsewhere, in fp32."""
    model, batch = build(case.model, dtype=torch.float32), make_batch(case.model)
    found = []
    for change in (0, 1):
        changed = batch._replace(
            tokens=torch.where(batch.valid, batch.tokens, (batch.tokens + change) % VOCAB_SIZE),
            token_types=torch.where(batch.valid, batch.token_types, 1 - change),
        )
        model.zero_grad()
        output = model(**changed.inputs())
        output.loss_sums().sum().backward()
        kept = {
            "hidden": output.hidden[batch.valid],
            "losses": torch.cat([x.flatten() for x in losses(tensors(output))]),
        }
        found.append(kept | gradients(model))
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_of_padding_alone_are_finite_and_teach_nothing(case: Case, dtype: torch.dtype):
    model, batch = build(case.model, dtype=dtype), make_batch(case.model)
    alone = take_samples(batch, slice(-1, None))
    output = model(**alone.inputs())
    for name, tensor in tensors(output).items():
        assert torch.isfinite(tensor).all(), name
    assert output.loss_sums().eq(0).all()
    output.loss_sums().sum().backward()
    for name, gradient in gradients(model).items():
        assert gradient.eq(0).all(), name
    assert alone.label_counts().eq(0).all()


@every_case
def test_gradient_is_finite_where_a_row_of_padding_has_labels(case: Case):
    model, batch = build(case.model, dtype=torch.float32), make_batch(case.model)
    model(**batch._replace(sequence_labels=torch.zeros(4, dtype=torch.int64)).inputs()).loss_sums().sum().backward()
    for name, gradient in gradients(model).items():
        assert torch.isfinite(gradient).all(), name


@every_case
def test_a_document_keeps_its_bits_when_its_neighbour_changes(case: Case):
    if case.model.num_classes is not None:
        pytest.skip("the sequence head reads all documents of a sequence")
    model, batch = build(case.model, dtype=torch.float32), make_batch(case.model)
    documents = (torch.arange(LENGTH) >= 19).int().expand(4, LENGTH)
    found = []
    for change in (0, 1):
        tokens = torch.where(documents == 0, (batch.tokens + change) % VOCAB_SIZE, batch.tokens)
        output = model(tokens, valid=batch.valid, document_ids=documents)
        found.append(output.hidden[:, 19:])
    assert torch.equal(*found)


def test_masked_logits_are_those_of_their_positions():
    """Any order and number of positions; other positions have no influence."""
    case = CASES[0]
    model, batch = build(case.model), make_batch(case.model)
    everywhere = torch.arange(LENGTH).expand(4, LENGTH)
    full = model(batch.tokens, valid=batch.valid, masked_positions=everywhere).masked_logits
    picked = model(batch.tokens, valid=batch.valid, masked_positions=batch.masked_positions).masked_logits
    rows = torch.arange(4)[:, None]
    torch.testing.assert_close(picked, full[rows, batch.masked_positions], rtol=1e-12, atol=1e-12)
    assert (picked[..., VOCAB_SIZE:] == float("-inf")).all()


def test_only_predictions_have_logits():
    case = CASES[0]
    model, batch = build(case.model), make_batch(case.model)
    largest = 0

    def note(module, inputs, output):
        nonlocal largest
        largest = max(largest, output.numel())

    model.masked_head.register_forward_hook(note)
    output = model(**batch.inputs())
    assert largest == output.masked_logits.numel() == 4 * batch.masked_positions.shape[1] * 384


def test_bounded_logits_leave_padding_without_a_probability():
    (case,) = (case for case in CASES if case.model.logit_bounds is not None)
    output = build(case.model)(**make_batch(case.model).inputs())
    known, padding = output.masked_logits[..., :VOCAB_SIZE], output.masked_logits[..., VOCAB_SIZE:]
    assert [known.min().item(), known.max().item()] == case.model.logit_bounds
    assert padding.isneginf().all()


def test_padded_rows_of_the_vocabulary_learn_nothing():
    model, batch = build(CASES[0].model), make_batch(CASES[0].model)
    model(**batch.inputs()).loss_sums().sum().backward()
    for parameter in (model.embedding.weight, model.masked_head.vocabulary.bias):
        assert parameter.grad[:VOCAB_SIZE].norm() > 0
        assert parameter.grad[VOCAB_SIZE:].eq(0).all()


@every_case
def test_operations_are_those_of_the_built_model(case: Case):
    if any(block.sublayers[0].widest_window for _, block in case.model.blocks()):
        pytest.skip("windows are computed in full, padded ones too")
    if case.name == "two-way":
        pytest.skip("the scan of the reference does not count as kernels do; see the next test")
    model = build(case.model, dtype=torch.float32)
    length, rows = 40, 3
    positions = None if case.model.num_classes else torch.zeros(rows, 6, dtype=torch.int64)  # 15 % of 40
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # its matmuls are counted
        model(torch.zeros(rows, length, dtype=torch.int64), masked_positions=positions)
    padding = 0 if positions is None else 2 * 4 * rows * 6 * model.config.hidden_size
    counted = counter.get_total_flops() - padding
    assert 0 <= rows * length * model.forward_flops(length) - counted < rows * length
    assert model.training_flops(length) == 3 * model.forward_flops(length)


def test_the_second_direction_costs_a_second_scan():
    """HGRN2's own operations are compared with a counted forward in test_language_model.py."""
    options = {"num_heads": 12, "chunk_size": 16}
    scope = BuildContext(48, 0, 2, TensorParallel(), 0.02, "x", 0.02)
    one, two = HGRN2Config(**options).build(scope), TwoWayHGRN2Config(**options).build(scope)
    projections = 2 * 4 * 48 * 48
    assert two.flops(40) - projections == 2 * (one.flops(40) - projections) > 0


@pytest.mark.parametrize("kind", ["bidirectional_softmax", "two_way_hgrn2"])
def test_heads_that_do_not_divide_the_width_are_refused(kind: str):
    with pytest.raises(ConfigError, match=r"num_heads = 7 does not divide model.hidden_size = 48; choose a divisor"):
        Encoder(model({"type": kind, "num_heads": 7}))


def test_rotary_positions_need_heads_of_an_even_width():
    with pytest.raises(ConfigError, match=r"num_heads = 16 .* into heads of an even width, as rope_base needs"):
        Encoder(model(ROTARY | {"num_heads": 16}))
    Encoder(model(SOFTMAX | {"num_heads": 16}))


@pytest.mark.parametrize("kind", ["bidirectional_softmax", "two_way_hgrn2"])
def test_states_are_refused(kind: str):
    config = model([{"type": kind, "num_heads": 4}]).layers[0].sublayers[0]
    built = config.build(BuildContext(48, 0, 1, TensorParallel(), 0.02, "model.layers.0.sublayers.0", 0.02))
    x, context = torch.zeros(1, 1, 48), MixerContext(torch.zeros(1), DocumentView(), torch.float32, (), True)
    assert built.state_shapes() == []
    for call in (lambda: built(x, context, ()), lambda: built.step(x, context, ())):
        with pytest.raises(
            ConfigError, match=rf"model.layers.0.sublayers.0: {kind} \w+ (to )?later tokens.*with a decoder"
        ):
            call()


@pytest.mark.parametrize(("name", "millions"), [("small", 30.61), ("base", 109.99), ("large", 335.91)])
def test_presets_have_the_published_counts(name: str, millions: float):
    model = Encoder(load_preset(f"danet-{name}").model)
    assert next(model.parameters()).is_meta
    assert round(model.num_parameters() / 1e6, 2) == millions
    assert model.num_embedding_parameters() == (30528 + 512 + 2) * model.config.hidden_size


@pytest.mark.parametrize(("name", "parameters"), [("base", 110_106_428), ("large", 336_226_108)])
def test_softmax_presets_have_the_counts_of_the_released_models(name: str, parameters: int):
    """Those of transformers' BertForPreTraining; without the masked-token and next-sentence heads, of BertModel."""
    model = Encoder(load_preset(f"bert-{name}").model)
    assert model.num_parameters() == parameters
    heads = sum(p.numel() for p in [*model.masked_head.dense.parameters(), *model.masked_head.norm.parameters()])
    heads += 30522 + sum(p.numel() for p in model.sequence_head.classifier.parameters())
    assert parameters - heads == {"base": 109_482_240, "large": 335_141_888}[name]


def test_norm_after_the_addition_needs_a_mixer_that_leaves_it_to_the_block():
    layers = [{"sublayers": [{"type": "dense_attention", "num_heads": 4, "residual": "add_norm"}]}]
    with pytest.raises(
        ConfigError, match=r'dense_attention applies norm = "maxnorm" to its input, so there is no norm'
    ):
        parse_model(table(kind="encoder", layers=layers), "x")


def test_vectors_and_biases_do_not_decay():
    names = Encoder(CASES[0].model).no_decay_names()
    assert names == {
        "norm.weight",
        "masked_head.norm.weight",
        "masked_head.vocabulary.bias",
        "sequence_head.classifier.bias",
    }


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("heads", "one-head", "local", "classes")])
def test_loss_falls_by_half_in_sixty_steps(case: Case):
    model, batch = build(case.model, dtype=torch.float32), make_batch(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(60):
        loss = (model(**batch.inputs()).loss_sums() / batch.label_counts()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_optimizer_step()
        found.append(loss.item())
    assert found[-1] < found[0] / 2, (found[0], found[-1])


def test_cases_cover_their_own_claims():
    assert SIZES[-1] == 0
    assert make_batch(CASES[0].model).label_counts().tolist() == [3 + 5 + 7, 3]
    assert make_batch(CASES[3].model).label_counts().tolist() == [3]


def table(**fields):
    layers = [{"sublayers": [{"type": "dense_attention", "num_heads": 4}]}]
    return {"vocab_size": 300, "hidden_size": 32, "layers": layers} | fields


def test_decoder_refuses_mixers_that_attend_to_later_tokens():
    rule = r'layers.0.sublayers.0.type = "dense_attention": it attends to later tokens.*with kind = "encoder"'
    with pytest.raises(ConfigError, match=rule):
        parse_model(table(), "x")


def test_encoder_refuses_causal_mixers_and_names_each():
    causal = [{"type": kind, "num_heads": 4} for kind in ("tnl", "hgrn2")]
    layers = [{"sublayers": [*causal, {"type": "glu", "intermediate_size": 9}]}]
    with pytest.raises(ConfigError) as raised:
        parse_model(table(kind="encoder", layers=layers), "x")
    lines = str(raised.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        'layers.0.sublayers.0.type = "tnl"',
        'layers.0.sublayers.1.type = "hgrn2"',
    ]
    assert "it attends to earlier tokens only, so an encoder cannot use it" in lines[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "encodr"}, "kind = 'encodr': input should be 'decoder'"),
        ({"kind": "encoder", "tie_embeddings": False}, "tie_embeddings: unknown key"),
        ({"kind": "encoder", "num_classes": 1}, "num_classes = 1"),
        ({"kind": "encoder", "pooling": "last"}, "pooling = 'last'"),
        ({"kind": "encoder", "logit_bounds": [2.0, 2.0]}, r"logit_bounds = \[2.0, 2.0\]: give the least and a larger"),
        (
            {"kind": "encoder", "logit_bounds": [-20.0, 2.0], "num_classes": 2},
            r"logit_bounds = \[-20.0, 2.0\] has no effect with num_classes",
        ),
    ],
)
def test_config_of_another_kind_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        parse_model(table(**fields), "x")


def test_config_is_an_encoder_by_its_kind():
    assert isinstance(parse_model(table(kind="encoder"), "x"), EncoderConfig)
    assert parse(EncoderConfig, table(kind="encoder"), "x") == parse_model(table(kind="encoder"), "x")
