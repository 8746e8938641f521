"""Characters that are single tokens of a byte-level BPE: everywhere in a text, in any script, with exact merges."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megalin.data.tokenizers.tokenizer import BytePairTrainer, HuggingFaceTokenizer
from megalin.errors import ConfigError

COMMON = "".join(map(chr, range(0x4E00, 0x4E40)))
ADDED = COMMON + "\u00e9\u00ff\u03b1\u0416\u3000\u9f98\U0001f600\U0010ffff"
"""Two to four bytes, letters and others; of some only a prefix is shared, and most are rare or absent in the texts."""
OTHERS = "abc  .,1\n\u00e8\u03b2\u4e41\u4f60\u9f99\uac00\U0001f601"


def random_texts(characters: str, *, count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices(characters, k=generator.randint(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("whole") / "tokenizer.json"
    texts = random_texts(COMMON[:20] + OTHERS, count=400, seed=1)
    BytePairTrainer(600, special_tokens=["[MASK]"], characters=ADDED).train(texts).save(path)
    return HuggingFaceTokenizer(path)


def test_each_character_is_one_token(tokenizer):
    ids = [tokenizer.encode(character) for character in ADDED]
    assert [len(each) for each in ids] == [1] * len(ADDED)
    assert len({each[0] for each in ids}) == len(ADDED)
    assert tokenizer.vocab_size == 600
    assert {tokenizer.token_bytes()[each[0]] for each in ids} == {2, 3, 4}


def test_no_token_ends_inside_a_character(tokenizer):
    sizes = tokenizer.token_bytes()
    for text in random_texts(ADDED + OTHERS, count=500, seed=2):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        ends = set(np.cumsum(sizes[ids]).tolist())
        start = 0
        for character in text:
            size = len(character.encode())
            if character in ADDED:
                assert not ends & set(range(start + 1, start + size)), (text, character)
            start += size


def test_batches_give_the_same_ids(tokenizer):
    texts = random_texts(ADDED + OTHERS, count=100, seed=3)
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_merges_are_those_of_characters(tmp_path):
    """The segments equal those of a BPE that reads characters, not bytes."""
    texts = random_texts(COMMON[:12], count=300, seed=4)
    merges = 150
    expected = tokenizers.Tokenizer(models.BPE())
    expected.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    alphabet = list(COMMON)
    trainer = trainers.BpeTrainer(vocab_size=len(COMMON) + merges, initial_alphabet=alphabet, show_progress=False)
    expected.train_from_iterator(texts, trainer)
    prefixes = 1  # all characters of COMMON share their first two bytes
    path = tmp_path / "tokenizer.json"
    size = 257 + len(COMMON) + prefixes + merges
    BytePairTrainer(size, characters=COMMON).train(texts).save(path)
    actual = HuggingFaceTokenizer(path)
    assert actual.vocab_size == size
    longest = 0
    for text in random_texts(COMMON, count=100, seed=5) + texts[:50]:
        segments = [actual.decode([number]) for number in actual.encode(text)]
        assert segments == expected.encode(text).tokens
        longest = max(longest, *map(len, segments))
    assert longest > 2


def test_a_vocabulary_without_room_for_the_characters_is_refused():
    message = "vocab_size = 321: a byte-level BPE with 64 added characters and their prefixes \\(1\\) needs 322 to"
    with pytest.raises(ConfigError, match=message):
        BytePairTrainer(321, characters=COMMON + "ascii")
    assert BytePairTrainer(322, characters=COMMON).train([COMMON]).vocab_size == 322
