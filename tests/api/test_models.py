"""Models of the Python API: their weights, logits, loss, state and completions, and what they refuse."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

import megalin
from megalin.errors import ConfigError, MegalinError, OperandError
from megalin.generation import Sampling, generate
from megalin.model.config import ModelConfig, parse_model
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import full_tensor
from megalin.train.build import build_model
from tests.model_runs import CPU, DROPOUT, model_table

VOCAB = 257


@pytest.fixture(scope="module")
def model() -> megalin.CausalLM:
    """A decoder in eval mode; read-only."""
    return megalin.build_model(model_table(), device="cpu").eval()


def ids(batch: int = 2, length: int = 37) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def test_import_needs_no_torch():
    code = "import sys, megalin; dir(megalin); assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for room in (megalin, megalin.ops, megalin.datasets):
        assert [name for name in room.__all__ if getattr(room, name) is None] == []
    with pytest.raises(AttributeError, match="'megalin' has no attribute 'traner'"):
        megalin.traner  # noqa: B018
    assert set(megalin.__all__) <= set(dir(megalin))


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 0), (torch.bfloat16, 3)])
def test_weights_and_logits_are_those_of_a_run(dtype: Any, seed: int):
    built = megalin.build_model({"model": model_table()}, device="cpu", dtype=dtype, seed=seed)
    compute = getattr(torch, str(dtype).removeprefix("torch."))
    options: dict[str, Any] = {"compute_dtype": compute, "recompute": False, "compile_blocks": False, "seed": seed}
    with process_group(CPU):
        trained = build_model(parse_model(model_table(), "table"), Mesh(ParallelConfig(), CPU), **options)
        weights = {name: full_tensor(weight.detach()) for name, weight in trained.named_parameters()}
        logits = trained(ids()).logits[..., :VOCAB]
    own = dict(built.language_model.named_parameters())
    assert own.keys() == weights.keys()
    assert [name for name, weight in weights.items() if not torch.equal(own[name], weight.to(own[name].dtype))] == []
    assert {weight.dtype for weight in own.values()} == {torch.float32, compute}
    assert torch.equal(built(ids()).logits, logits)


def test_presets_configs_and_files_name_models(tmp_path):
    (tmp_path / "mine.toml").write_text('[model]\npreset = "tnl-tiny"\nvocab_size = 300\n')
    config = parse_model(model_table(), "table")
    assert megalin.build_model(config, device="cpu").config is config
    from_file = megalin.build_model(tmp_path / "mine.toml", device="cpu")
    from_table = megalin.build_model({"preset": "tnl-tiny", "vocab_size": 300}, device=torch.device("cpu"))
    assert from_file.config == from_table.config
    assert (from_file.config.vocab_size, from_file.num_parameters()) == (300, from_table.num_parameters())
    assert "tnl-tiny" in megalin.presets()
    assert "hgrn2-160m" in megalin.presets("hgrn2")


def test_loss_is_the_mean_cross_entropy_of_shifted_labels(model: megalin.CausalLM):
    tokens, labels = ids(), ids()
    labels[:, 5:9] = -100
    output = model(tokens, labels=labels)
    expected = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert output.logits.shape == (2, 37, VOCAB)
    torch.testing.assert_close(output.loss, expected)
    targets = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    torch.testing.assert_close(model(tokens, targets=targets).loss, expected)
    alone = model(tokens, labels=labels, return_logits=False)
    torch.testing.assert_close(alone.loss, expected, check_dtype=False)
    assert (alone.logits, alone.state) == (None, None)
    assert model(tokens, labels=torch.full_like(labels, -100)).loss == 0.0


def test_documents_of_a_sequence_neither_see_nor_predict_each_other(model: megalin.CausalLM):
    tokens = ids(1, 30)
    documents = (torch.arange(30) >= 13).int()[None]
    output = model(tokens, labels=tokens, document_ids=documents)
    parts = [model(part, labels=part) for part in (tokens[:, :13], tokens[:, 13:])]
    torch.testing.assert_close(output.logits, torch.cat([part.logits for part in parts], 1))
    torch.testing.assert_close(output.loss, (12 * parts[0].loss + 16 * parts[1].loss) / 28)


def test_state_continues_the_sequence(model: megalin.CausalLM):
    tokens = ids()
    first = model(tokens[:, :20], return_state=True)
    second = model(tokens[:, 20:], state=first.state)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), model(tokens).logits)
    assert second.state.positions.tolist() == [37, 37]


def test_gradients_reach_every_weight_and_a_step_lowers_the_loss():
    model = megalin.build_model(model_table(), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(3):
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        assert [name for name, weight in model.named_parameters() if weight.grad is None] == []
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_samples_of_training_forwards_have_their_own_dropout():
    model = megalin.build_model(model_table() | DROPOUT, device="cpu")
    tokens = ids(1).expand(2, -1)
    first, second = (model(tokens).logits for _ in range(2))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    assert torch.equal(model(tokens, draw=torch.arange(2)).logits, first)
    with pytest.raises(OperandError, match=r"no masks for a continued|of a continued sequence"):
        model(tokens, state=model.initial_state(2))
    assert torch.equal(model.eval()(tokens).logits[0], model(tokens).logits[1])


def test_completions_are_of_the_kind_of_the_prompts(model: megalin.CausalLM):
    model.train()
    sampling = Sampling(0.8, seed=2)
    expected = generate(model.language_model, [5, 6, 7], max_tokens=6, sampling=sampling)
    assert model.generate([5, 6, 7], max_tokens=6, seed=2) == expected
    assert model.generate([[5, 6, 7], [8]], max_tokens=6, seed=2)[0] == expected
    found = model.generate(torch.tensor([[5, 6, 7]]), max_tokens=6, seed=2)
    assert found.tolist() == [expected]
    assert model.generate(torch.tensor([5, 6, 7]), max_tokens=6, seed=2).tolist() == expected
    stop = expected[3]
    first = expected.index(stop)
    assert model.generate([5, 6, 7], max_tokens=6, seed=2, stop_ids=[stop]) == expected[:first]
    several = model.generate(torch.tensor([[5, 6, 7], [8, 9, 1]]), max_tokens=6, seed=2, stop_ids=[stop])
    assert several[0].tolist() == expected[:first] + [stop] * (several.shape[1] - first)
    assert model.training
    model.eval()


REFUSED: list[tuple[Any, str]] = [
    (
        lambda m: megalin.build_model("tnl-tinny"),
        "preset 'tnl-tinny': there is no such preset; did you mean 'tnl-tiny'",
    ),
    (lambda m: megalin.presets("hgrn"), "family 'hgrn': no presets of this family; did you mean 'hgrn2'?"),
    (
        lambda m: megalin.build_model({"preset": "tnl-tiny", "vocab": 9}),
        "vocab: unknown key; did you mean 'vocab_size'",
    ),
    (lambda m: megalin.build_model({"model": 3}), "model = 3 is not a table; give its keys as a dict"),
    (lambda m: megalin.build_model("none.toml"), "none.toml: no such config file"),
    (lambda m: megalin.build_model(3), "3 names no model; give a preset's name, a config, a dict, or the path"),
    (
        lambda m: megalin.build_model("bert-tiny"),
        'this model has kind = "encoder", which has no next-token logits',
    ),
    (lambda m: megalin.build_model("tnl-tiny", device="cuda:99"), 'device = "cuda:99", but '),
    (lambda m: megalin.build_model("tnl-tiny", device="gpu"), 'device = \'gpu\' names no device; use "cpu", "cuda"'),
    (lambda m: megalin.build_model("tnl-tiny", device="meta"), 'device = "meta": megalin computes on CPUs and on GPUs'),
    (lambda m: megalin.build_model("tnl-tiny", dtype="float64"), "dtype = 'float64': weights have no such dtype here"),
    (lambda m: megalin.build_model("tnl-tiny", seed=-1), "seed = -1 is negative"),
    (lambda m: m(ids() + VOCAB), "outside of the vocabulary of 257 ids (0 to 256)"),
    (lambda m: m(ids() - VOCAB), "input_ids has the id -"),
    (lambda m: m(ids(), labels=ids() - 300), "labels has the id -"),
    (lambda m: m(ids(), labels=ids() + VOCAB), "labels has the id"),
    (lambda m: m(ids(), labels=ids()[:, 1:]), "labels has the shape [2, 36], but input_ids [2, 37]; give equal ones"),
    (lambda m: m(ids(), labels=ids(), targets=ids()), "labels and targets are both given"),
    (lambda m: m(ids()[0]), "input_ids has the shape [37]; give ids [B, T]"),
    (lambda m: m(ids().float()), "input_ids has the dtype torch.float32; use torch.int64"),
    (lambda m: m(ids().to("meta")), 'input_ids is on "meta", but the model on "cpu"'),
    (lambda m: m(ids(), state=m.initial_state(3)), "state is of 3 sequences, but input_ids has 2; give as many"),
    (lambda m: m.generate("text"), "prompts of text, but the model has no tokenizer; give lists of ids"),
    (lambda m: m.generate([1, "a"]), "prompts of type list: give a text, a list of texts"),
    (
        lambda m: m.generate(torch.ones(3)),
        "prompts of shape [3] and dtype torch.float32: give ids as an integer tensor",
    ),
    (lambda m: m.generate([[1], []]), "prompt 1 has no tokens"),
    (lambda m: m.generate(ids()[0, :0]), "prompt 0 has no tokens; give some text"),
    (lambda m: m.generate(ids()[:, :0]), "prompt 0 has no tokens; give some text\nprompt 1 has no tokens"),
    (lambda m: m.generate(ids()[:0]), "no prompts; give at least one"),
    (lambda m: m.generate([VOCAB]), "token 257 is outside the vocabulary of 257 ids"),
    (lambda m: m.generate([1], temperature=-1.0), "temperature = -1.0 is not in [0, inf)"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refuses(model: megalin.CausalLM, call: Any, message: str):
    with pytest.raises(MegalinError) as raised:
        call(model)
    assert message in str(raised.value)


def test_softmax_model_of_a_run_refuses_prompts_beyond_its_positions(model: megalin.CausalLM):
    limited = megalin.CausalLM(model.language_model, max_positions=10)
    with pytest.raises(ConfigError, match="prompt 0 has 8 tokens; with 3 new ones that is more than the 10 positions"):
        limited.generate([1] * 8, max_tokens=3)


def test_copies_int32_ids_and_autocast(model: megalin.CausalLM):
    tokens = ids()
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    expected = model(tokens, labels=tokens).loss
    assert torch.equal(other(tokens.int(), labels=tokens.int()).loss, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(tokens, labels=tokens).loss, expected, atol=0.05, rtol=0.0)


@pytest.mark.slow
def test_compiled_model_has_the_same_loss(model: megalin.CausalLM):
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(ids(), labels=ids()).loss, model(ids(), labels=ids()).loss)


def test_config_of_a_model_is_a_decoder_s(model: megalin.CausalLM):
    assert isinstance(model.config, ModelConfig)
    assert model.device == CPU
