"""Published vocabularies in tiktoken's format: their tables, how they are recognised, and the ends of documents."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from tiktoken_ext import openai_public

from megalin.data.shards.indexed_dataset import Shard
from megalin.data.tokenizers import rank_families
from megalin.data.tokenizers.rank_families import FAMILIES, PATTERNS, RankFamily, family_of
from megalin.data.tokenizers.tokenizer import TokenizerFiles, load_tokenizer
from megalin.errors import ConfigError, DataError
from tools import preprocess_data

RANKS = {bytes([byte]): byte for byte in range(256)} | {b"he": 256, b"th": 257, b"the": 258, b" the": 260}
"""A small vocabulary whose rank 259 is free for a special token, as p50k's 50256 is."""
FAMILY = RankFamily(
    name="small",
    pattern="llama3",
    num_ranks=260,
    known_ranks={b"the": 258, b" the": 260},
    special_tokens={"<|end|>": 259, "<|begin|>": 261, "<|reserved|>": 270},
    end="<|end|>",
    begin="<|begin|>",
)


def write(path: Path, ranks: dict[bytes, int]) -> Path:
    path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    return path


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A file with a family of its own, under the name of Meta's files."""
    monkeypatch.setattr(rank_families, "FAMILIES", (FAMILY,))
    return write(tmp_path / "tokenizer.model", RANKS)


@pytest.mark.parametrize(
    ("name", "own"), [("r50k", "r50k_base"), ("p50k", "p50k_base"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base")]
)
def test_tables_of_openai_are_those_of_tiktoken(monkeypatch, name, own):
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    published = getattr(openai_public, own)()
    (family,) = (each for each in FAMILIES if each.name == name)
    assert PATTERNS[family.pattern] == published["pat_str"]
    assert dict(family.special_tokens) == published["special_tokens"]
    if "explicit_n_vocab" in published:
        assert family.num_ranks + len(family.special_tokens) == published["explicit_n_vocab"]


@pytest.mark.parametrize(
    ("name", "begin", "end", "vocab_size", "others"),
    [
        ("Llama 3", 128000, 128001, 128256, {"<|eot_id|>": 128009, "<|reserved_special_token_245|>": 128255}),
        (
            *("Llama 4", 200000, 200001, 202048),
            {"<|eot|>": 200008, "<|image_start|>": 200080, "<|patch|>": 200092, "<|reasoning_thinking_end|>": 201143},
        ),
        ("Qwen", None, 151643, 151851, {"<|im_end|>": 151645, "<|extra_204|>": 151850}),
    ],
)
def test_tables_of_other_publishers(name, begin, end, vocab_size, others):
    (family,) = (each for each in FAMILIES if each.name == name)
    special = family.special_tokens
    assert (None if family.begin is None else special[family.begin], special[family.end]) == (begin, end)
    assert sorted(special.values()) == list(range(family.num_ranks, vocab_size))
    assert others.items() <= special.items()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_recognised_by_its_ranks_and_not_by_their_number(family):
    free = (rank for rank in range(10**6) if rank not in family.known_ranks.values())
    ranks = {b"%d" % place: next(free) for place in range(family.num_ranks - len(family.known_ranks))}
    assert family_of(ranks | family.known_ranks) is family
    for token in family.known_ranks:
        assert family_of(ranks | family.known_ranks | {token: -1}) is None


def test_special_tokens_of_a_family_are_its_own(small):
    tokenizer = load_tokenizer(str(small))
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (259, 271)
    assert [tokenizer.token_id(name) for name in ("<|begin|>", "the", "<|none|>")] == [261, 258, None]
    assert tokenizer.decode([261, 258, 265, 259]) == "<|begin|>the<|end|>"  # 265 is no token
    assert tokenizer.encode("the<|end|>") == [258, *b"<|end|>"]
    assert tokenizer.token_bytes()[[258, 259, 261, 265, 270]].tolist() == [3, 0, 0, 0, 0]


def test_documents_of_preprocess_end_with_the_family_s_token(small, tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " the"}) + "\n")
    flags = ["--input", str(tmp_path / "text.jsonl"), "--tokenizer-model", str(small), "--append-eod"]
    for given, expected in (([], 259), (["--eod-token", "<|reserved|>"], 270), (["--eod-token", "261"], 261)):
        output = ["--tokenizer-type", "TikTokenizer", "--output-prefix", str(tmp_path / f"shard{expected}"), *given]
        assert preprocess_data.main([*flags, *output]) == 0
        with Shard(tmp_path / f"shard{expected}_text_document") as shard:
            assert list(shard.read(0, 2)) == [260, expected]


@pytest.mark.parametrize(
    ("change", "pattern", "eod_token", "error", "message"),
    [
        ({}, "", 265, DataError, "small has no token of id 265 to end a document; give another"),
        ({}, "", 271, DataError, "has no id 271 to end a document; give one from 0 to 270"),
        ({}, "", "<|no|>", DataError, "has no token '<|no|>' to end a document; give one of its tokens, or an id"),
        ({}, "llama2", None, ConfigError, "pattern 'llama2': no such pattern; give one of gpt2, cl100k, o200k, llama3"),
        ({b"zz": 259}, "", None, ConfigError, "261 ranks of no known vocabulary; give --tiktoken-pattern gpt2, cl100k"),
        ({b"zz": 259}, "gpt2", None, ConfigError, "vocabulary; give --eod-token ID (data.eod_token), the id that ends"),
        ({b"zz": 259}, "", 261, ConfigError, "261 ranks of no known vocabulary; give --tiktoken-pattern gpt2, cl100k"),
        ({b"the": 260, b" the": 258}, "gpt2", 300, DataError, "expected every byte and each rank from 0 to 259 once"),
    ],
)
def test_other_ranks_need_a_pattern_and_an_end(small, change, pattern, eod_token, error, message):
    write(small, RANKS | change)
    with pytest.raises(error, match=re.escape(message)):
        TokenizerFiles("tiktoken", (str(small),), pattern, eod_token).load()


def test_other_ranks_end_documents_with_the_given_id(small):
    write(small, RANKS | {b"zz": 259})
    for given, eod_id, vocab_size in ((300, 300, 301), ("zz", 259, 261), ("10", 10, 261)):
        tokenizer = TokenizerFiles("tiktoken", (str(small),), "gpt2", given).load()
        assert (tokenizer.eod_id, tokenizer.vocab_size) == (eod_id, vocab_size)
    assert TokenizerFiles("tiktoken", (str(small),), "gpt2", 300).load().decode([257, 300]) == "th<|endoftext|>"


def test_ranks_and_tekken_are_no_files_of_other_kinds(small, tmp_path):
    with pytest.raises(DataError, match=r"not a SentencePiece model: .*; it is a file of ranks: use --tok"):
        TokenizerFiles("sentencepiece", (str(small),)).load()
    (tmp_path / "tekken.json").write_text('{"config": {}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}')
    with pytest.raises(DataError, match=r"it is Mistral's tekken\.json: give the tokenizer\.json of the same model"):
        load_tokenizer(str(tmp_path / "tekken.json"))


def test_text_of_qwen_is_encoded_in_its_normal_form(small, monkeypatch):
    monkeypatch.setattr(rank_families, "FAMILIES", (FAMILY._replace(normal_form="NFC"),))
    tokenizer = load_tokenizer(str(small))
    assert tokenizer.encode("e\u0301") == tokenizer.encode_batch(["é"])[0] == list("é".encode())
