"""Properties of every kind of tokenizer: completions that follow their prompts, special ids, counted bytes."""

from __future__ import annotations

import json
import random

import pytest

from megalin.data.tokenizers.altered_text import altered_text
from megalin.data.tokenizers.tokenizer import WithSpecialTokens
from megalin.errors import DataError
from megalin.generation.prompts import completion_text, encode_prompts
from tests.data.tokenizers.kinds import KINDS, TEXTS, library_tokenizer, make

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"String": "x"}, "invert": False}
PROMPTS = ["the cat", "the", "a", " the  cat ", "héllo w", "日本", "def f(\n", "🙂", "word, the"]
TAILS = [" sat on the mat", " cat", "s", "  \n x", "日本語", " é", ", the rest?", "🙂🙂"]


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path):
    return make(request.param, tmp_path).load()


def test_completion_follows_the_text_of_its_prompt(tokenizer):
    """The ids of a whole text after those of its begin: the rest of the text. Any ids: what they add to the text."""
    rng = random.Random(0)
    followed = 0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        for tail in TAILS:
            whole = tokenizer.encode(prompt + tail)
            texts = (tokenizer.decode(ids), tokenizer.decode(whole))
            if whole[: len(ids)] == ids and texts == (prompt, prompt + tail):
                assert completion_text(tokenizer, ids, whole[len(ids) :]) == tail
                followed += tail.startswith(" ")
        known = sorted({token for text in TEXTS for token in tokenizer.encode(text)})
        for _ in range(20):
            new = rng.choices(known, k=rng.randint(0, 4))
            added = completion_text(tokenizer, ids, new)
            # Byte fallback spoils the bytes of the prompt's last character before others that make no character.
            if (text := tokenizer.decode([*ids, *new])).startswith(tokenizer.decode(ids)):
                assert tokenizer.decode(ids) + added == text, (prompt, new)
    assert followed > 3


def test_special_ids_before_a_prompt_have_no_part_in_its_completion(tokenizer):
    for prompt in ("the cat", ""):
        ids = tokenizer.encode(prompt)
        new = tokenizer.encode("the rest")
        begun = [*tokenizer.special.before, *ids]
        assert completion_text(tokenizer, begun, new) == completion_text(tokenizer, ids, new)
        if tokenizer.special.before:
            assert encode_prompts(tokenizer, [prompt], special_tokens=True) == [begun]
    assert completion_text(tokenizer, [], new) == tokenizer.decode(new)


def test_bytes_of_the_ids_are_those_of_the_text_or_said_to_be_others(tokenizer, request):
    name = request.node.callspec.params["tokenizer"]
    exact = name in ("bytes", "tiktoken", "byte level", "byte level + begin")
    if not exact and "byte level" not in name:
        with pytest.raises(DataError, match="bytes per token need a byte-level tokenizer"):
            tokenizer.token_bytes()
        return
    assert bool(tokenizer.altered) != exact
    texts = [*TEXTS, *PROMPTS, *TAILS, "  e\u0301 A\u030a ﬁ \u212a  "]
    counted = [int(tokenizer.token_bytes()[tokenizer.encode(text)].sum()) for text in texts]
    assert (counted == [len(text.encode()) for text in texts]) == exact


@pytest.mark.parametrize(
    ("change", "altered"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": []}}, ""),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, "the normalizer NFC"),
        ({"pre_tokenizer": None}, ""),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "the pre-tokenizer Whitespace"),
        ({"pre_tokenizer": SPLIT | {"behavior": "Isolated"}}, ""),
        ({"pre_tokenizer": SPLIT | {"behavior": "Removed"}}, "the pre-tokenizer Split"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL | {"add_prefix_space": True}]}},
            "the pre-tokenizer ByteLevel, which adds a space",
        ),
        ({"added_tokens": [{"content": "<|x|>", "special": True, "lstrip": True}]}, ""),
        ({"added_tokens": [{"content": "x", "rstrip": True}]}, "the token 'x', which takes the white space around it"),
        ({"model": {"type": "BPE", "vocab": {}}}, "256 bytes without a token"),
    ],
)
def test_parts_that_alter_a_text_are_named(tmp_path, change, altered):
    description = json.loads(library_tokenizer("byte level", tmp_path).to_str())
    assert altered_text(description | change) == altered


def test_special_ids_stand_around_texts(tokenizer):
    special = WithSpecialTokens(tokenizer)
    before, after = tokenizer.special.before, tokenizer.special.after
    assert special.encode_batch(PROMPTS) == [[*before, *tokenizer.encode(text), *after] for text in PROMPTS]
    assert special.encode("") == [*before, *after]
    assert special.digest == tokenizer.digest


@pytest.mark.parametrize(
    ("name", "before", "by_default"),
    [("word piece", [], False), ("word piece + begin", ["<s>"], True), ("sentencepiece", ["<s>"], False)],
)
def test_special_ids_are_those_of_the_file(tmp_path, name, before, by_default):
    tokenizer = make(name, tmp_path).load()
    ids = tuple(tokenizer.token_id(token) for token in before)
    assert tokenizer.special == (ids, (), by_default, ids[0] if by_default else None)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    begin = tokenizer.token_id("<s>")
    with_settings = make(name, tmp_path).load().special
    assert with_settings == (ids, (), by_default or name == "sentencepiece", begin)


def test_bytes_of_no_character_are_the_completion_s_alone(tmp_path):
    tokenizer = make("byte fallback", tmp_path).load()
    ids = tokenizer.encode("日")
    assert tokenizer.decode([*ids, ids[-1]]) != "日\ufffd"  # the library spoils the character before
    assert completion_text(tokenizer, ids, [ids[-1]]) == "\ufffd"
