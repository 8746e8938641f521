"""Masked tokens: layout of a sample, rates of masked, random and kept tokens, and dependence on its number only."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from megalin.config import parse
from megalin.data.config import MaskingConfig
from megalin.data.masking import Draws, MaskedSample, SpecialTokens, Vocabulary, mask, resolve_tokens
from megalin.data.tokenizers.tokenizer import BytePairTrainer, ByteTokenizer, HuggingFaceTokenizer
from megalin.errors import ConfigError
from megalin.parallel.cross_entropy import IGNORED_LABEL

SPECIAL = SpecialTokens(cls=100, sep=101, mask=102, pad=103)
VOCABULARY = Vocabulary(SPECIAL, np.arange(100))
LENGTH = 64


def config(**fields) -> MaskingConfig:
    return MaskingConfig(**{"max_predictions": 12} | fields)


def make(sample: int, first: int = 20, second: int = 30, seed: int = 1, **fields) -> MaskedSample:
    text = np.random.default_rng(sample).integers(0, 100, first + second)
    draws = Draws(seed, "train", sample)
    return mask(text[:first], text[first:], config(**fields), VOCABULARY, draws, length=LENGTH)


def unmasked(sample: MaskedSample) -> np.ndarray:
    tokens = sample.tokens.copy()
    kept = sample.masked_labels != IGNORED_LABEL
    tokens[sample.masked_positions[kept]] = sample.masked_labels[kept]
    return tokens


def test_sample_is_cls_a_sep_b_sep_and_padding():
    sample, text = make(7), np.random.default_rng(7).integers(0, 100, 50)
    expected = [100, *text[:20], 101, *text[20:], 101, *[103] * 11]
    assert unmasked(sample).tolist() == expected
    assert sample.token_types.tolist() == [0] * 22 + [1] * 31 + [0] * 11
    assert sample.valid.tolist() == [True] * 53 + [False] * 11


def test_exactly_the_fraction_of_text_tokens_is_predicted_up_to_the_maximum():
    for first, second, expected in ((20, 30, 8), (1, 1, 1), (30, 31, 9), (3, 3, 1)):
        sample = make(3, first, second)
        kept = sample.masked_labels != IGNORED_LABEL
        assert kept.sum() == expected
        assert kept.tolist() == [True] * expected + [False] * (12 - expected)
        positions = sample.masked_positions[kept]
        assert (np.diff(positions) > 0).all()
        framed = {0, first + 1, first + second + 2}
        assert not framed & set(positions.tolist())
        assert positions.max() < first + second + 2
        assert (sample.masked_positions[~kept] == 0).all()
    assert (make(3, 20, 30, predicted_share=1.0).masked_labels != IGNORED_LABEL).sum() == 12


def test_eight_tenths_are_masked_a_tenth_is_random_a_tenth_is_kept():
    samples = [make(number) for number in range(3000)]
    labels = np.stack([sample.masked_labels for sample in samples])
    inputs = np.stack([sample.tokens[sample.masked_positions] for sample in samples])
    kept = labels != IGNORED_LABEL
    masked, same = (inputs == SPECIAL.mask)[kept].mean(), (inputs == labels)[kept].mean()
    assert masked == pytest.approx(0.8, abs=0.01)
    # One random token in a hundred equals the original.
    assert same == pytest.approx(0.101, abs=0.01)
    others = inputs[kept & (inputs != SPECIAL.mask) & (inputs != labels)]
    assert np.bincount(others, minlength=104)[:100].min() > 0
    assert others.max() < 100
    # All text positions are chosen about equally often, and no other position is.
    places = np.bincount(np.stack([sample.masked_positions for sample in samples])[kept], minlength=LENGTH)
    text = [*range(1, 21), *range(22, 52)]
    assert places[text].min() > 0.7 * places[text].mean()
    assert places.sum() == places[text].sum()


@pytest.mark.parametrize(("share", "same"), [(0.0, True), (1.0, False)])
def test_fractions_of_zero_and_one(share, same):
    sample = make(4, mask_share=share, random_share=0.0)
    kept = sample.masked_labels != IGNORED_LABEL
    inputs = sample.tokens[sample.masked_positions[kept]]
    assert (inputs == (sample.masked_labels[kept] if same else SPECIAL.mask)).all()


def test_draws_depend_on_seed_split_sample_and_purpose_alone():
    def draw(seed=1, split="train", sample=2, purpose="choose"):
        return Draws(seed, split, sample).uniform(purpose, 1000)

    assert np.array_equal(draw(), draw())
    others = [draw(seed=2), draw(split="validation"), draw(sample=3), draw(purpose="fate")]
    assert all(not np.array_equal(draw(), other) for other in others)
    assert draw().min() >= 0.0
    assert draw().max() < 1.0
    assert draw().mean() == pytest.approx(0.5, abs=0.03)


def test_samples_are_those_of_earlier_versions():
    """A golden digest; a change of it would change the samples of every resumed run."""
    text = np.arange(50) * 7 % 100
    sample = mask(text[:20], text[20:], config(), VOCABULARY, Draws(1, "train", 5), length=LENGTH)
    digest = hashlib.sha256(b"".join(field.astype("<i8").tobytes() for field in sample)).hexdigest()
    assert digest[:16] == "23ba7c65a6388e84"


def trained(tmp_path, *special: str) -> HuggingFaceTokenizer:
    BytePairTrainer(300, special_tokens=special).train(["some text of few words"] * 3).save(tmp_path / "tokenizer.json")
    return HuggingFaceTokenizer(tmp_path / "tokenizer.json")


def test_special_tokens_by_name_come_from_the_tokenizer(tmp_path):
    tokenizer = trained(tmp_path, "[CLS]", "[SEP]", "[MASK]", "[PAD]")
    found = resolve_tokens(config(), tokenizer, tokenizer.vocab_size)
    assert found.special == tuple(tokenizer.token_id(name) for name in ("[CLS]", "[SEP]", "[MASK]", "[PAD]"))
    assert len(found.ordinary) == tokenizer.vocab_size - 4
    assert not set(found.special) & set(found.ordinary.tolist())
    # A special token's name in a text is encoded as text.
    assert not set(found.special) & set(tokenizer.encode("[MASK] and [CLS]"))


def test_special_tokens_by_id_need_no_tokenizer():
    ids = {"cls_token": 257, "sep_token": 258, "mask_token": 259, "pad_token": 260}
    assert resolve_tokens(config(**ids), None, 261).special == (257, 258, 259, 260)
    found = resolve_tokens(config(**ids), ByteTokenizer(), 300)
    assert found.ordinary.tolist() == list(range(257))


def test_special_tokens_that_do_not_exist_are_all_named(tmp_path):
    with pytest.raises(ConfigError) as raised:
        resolve_tokens(config(pad_token=400), trained(tmp_path, "[CLS]", "[SEP]"), 300)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("data.masking.mask_token = '[MASK]' is not in the tokenizer; train one with it")
    assert lines[1] == "data.masking.pad_token = 400 has id 400, but model.vocab_size = 300; raise it to 401"
    with pytest.raises(ConfigError, match=r"cls_token = '\[CLS\]' is a name, but data.tokenizer is not set; give the"):
        resolve_tokens(config(sep_token=1, mask_token=2, pad_token=3), None, 300)
    with pytest.raises(
        ConfigError, match="pad_token = 2 has the id 2 of another special token; give each a different one"
    ):
        resolve_tokens(config(cls_token=0, sep_token=1, mask_token=2, pad_token=2), None, 300)
    assert ByteTokenizer().token_id("<|endoftext|>") == 256


def test_fractions_that_add_up_to_more_than_one_are_refused():
    with pytest.raises(ConfigError, match=r"mask_share = 0\.8 and random_share = 0\.3 add up to more than 1"):
        parse(MaskingConfig, {"max_predictions": 3, "random_share": 0.3}, "x")


@pytest.mark.parametrize("special", [("[A]", "[A]"), ("<|endoftext|>",), ("",)])
def test_tokenizer_refuses_special_tokens_that_repeat(special):
    with pytest.raises(ConfigError, match="names must not be empty or repeated"):
        BytePairTrainer(300, special_tokens=special)


def test_tokenizer_needs_room_for_special_tokens():
    with pytest.raises(ConfigError, match="needs 259 to"):
        BytePairTrainer(258, special_tokens=["[A]", "[B]"])
