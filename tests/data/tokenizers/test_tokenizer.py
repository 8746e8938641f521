"""Tokenizers: round trips, the end of a document, bytes per token, and hostile files."""

import base64
import json
import os
import re

import numpy as np
import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from megalin.data.tokenizers.rank_families import PATTERNS
from megalin.data.tokenizers.tiktoken_ranks import TiktokenTokenizer
from megalin.data.tokenizers.tokenizer import (
    BytePairTrainer,
    ByteTokenizer,
    HuggingFaceTokenizer,
    TokenizerFiles,
    load_tokenizer,
    tokenizer_files,
)
from megalin.errors import ConfigError, DataError

TEXTS = [
    "the cat sat on the mat and the other cat sat too\n" * 20,
    "héllo wörld, 日本語のテキスト 🙂 and the rest",
    "def function(argument):\n\treturn argument + 1  \n\n",
]
HARD = [*TEXTS, "", " ", "\x00\x01\x7f", "a<|endoftext|>b", "\r\n", "‮\ufeff", "<|endoftext|>", "x" * 5000]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    BytePairTrainer(400).train(TEXTS * 3).save(target)
    return target


def _vocabulary(path):
    """The bytes of each id of the trained BPE, without the first, <|endoftext|>."""
    of_byte = {character: byte for byte, character in _characters().items()}
    vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
    return [bytes(of_byte[c] for c in token) for token in sorted(vocabulary, key=vocabulary.get)[1:]]


@pytest.fixture(scope="module")
def gpt2(path):
    """The same BPE as vocab.json and merges.txt."""
    model = json.loads(path.read_bytes())["model"]
    (path.parent / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (path.parent / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return TokenizerFiles("gpt2", (str(path.parent / "vocab.json"), str(path.parent / "merges.txt")))


@pytest.fixture(scope="module")
def ranks(path):
    """The same BPE as a file of ranks."""
    lines = [b"%b %d" % (base64.b64encode(token), rank) for rank, token in enumerate(_vocabulary(path))]
    (path.parent / "t.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    return path.parent / "t.tiktoken"


@pytest.fixture(params=["bytes", "bpe", "gpt2", "tiktoken"])
def tokenizer(request, path, gpt2, ranks):
    tiktoken = TokenizerFiles("tiktoken", (str(ranks),), "gpt2", 1000)
    files = {"bytes": tokenizer_files("bytes"), "bpe": tokenizer_files(str(path)), "gpt2": gpt2, "tiktoken": tiktoken}
    return files[request.param].load()


def _characters():
    """The character of each byte in byte-level BPE: the byte's own if printable, else from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + k) for k, byte in enumerate(hidden)}


@pytest.mark.parametrize("text", [*HARD, *TEXTS])
def test_files_of_one_vocabulary_give_the_same_ids(path, gpt2, ranks, text):
    expected = load_tokenizer(str(path)).encode(text)
    assert gpt2.load().encode(text) == expected
    assert [token + 1 for token in TiktokenTokenizer(ranks, pattern="gpt2", eod_token=50256).encode(text)] == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt2", "I'll take 12345  things!\n\n x", ["I", "'ll", " take", " 12345", " ", " things", "!", "\n\n", " x"]),
        ("cl100k", "I'LL take 12345!\n\n x", ["I", "'LL", " take", " ", "123", "45", "!\n\n", " x"]),
        ("o200k", "HTMLParser's 12345/\n", ["HTMLParser's", " ", "123", "45", "/\n"]),
    ],
)
def test_published_patterns_cut_text_as_their_vocabularies_do(name, text, words):
    assert regex.findall(PATTERNS[name], text) == words


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    target = tmp_path_factory.mktemp("sentencepiece") / "t.model"
    with target.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 3), model_writer=file, vocab_size=300, byte_fallback=True, minloglevel=2
        )
    return target


def test_sentencepiece_gives_its_own_ids(sentencepiece_model):
    tokenizer = load_tokenizer(str(sentencepiece_model))
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert tokenizer.encode_batch(HARD) == [library.encode(text) for text in HARD] == list(map(tokenizer.encode, HARD))
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (300, library.eos_id())
    assert tokenizer.token_id("</s>") == library.eos_id()
    assert tokenizer.token_id("no such piece") is None
    with pytest.raises(DataError, match=r"t\.model: bytes per token need a byte-level tokenizer"):
        tokenizer.token_bytes()


def test_sentencepiece_without_an_end_is_refused(tmp_path):
    with (tmp_path / "t.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 3), model_writer=file, vocab_size=40, eos_id=-1, minloglevel=2
        )
    with pytest.raises(DataError, match=r"t\.model: has neither an end of sentence nor <\|endoftext\|>; train it"):
        load_tokenizer(str(tmp_path / "t.model"))


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("t.model", b"junk", DataError, "t.model: not a SentencePiece model"),
        ("t.tiktoken", b"YQ== 0\nYg==\n", DataError, "t.tiktoken:2: expected a token in base64 and its rank"),
        ("t.tiktoken", b"YQ== 0\n", DataError, "t.tiktoken: expected every byte and each rank from 0 to 0 once"),
    ],
)
def test_file_of_another_format_is_refused(tmp_path, name, data, error, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=re.escape(message)):
        load_tokenizer(str(tmp_path / name))


def test_gpt2_files_that_are_none_are_refused(tmp_path, gpt2):
    (tmp_path / "merges.txt").write_text("a b c\n")
    with pytest.raises(DataError, match="not GPT-2's vocabulary and merges"):
        TokenizerFiles("gpt2", (gpt2.files[0], str(tmp_path / "merges.txt"))).load()
    with pytest.raises(DataError, match=r"none\.txt: no such file; give GPT-2's vocab\.json and merges\.txt"):
        TokenizerFiles("gpt2", (gpt2.files[0], "none.txt")).load()


@pytest.mark.parametrize("text", HARD)
def test_any_text_comes_back_and_counts_its_bytes(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode("utf-8"))
    assert tokenizer.eod_id not in ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_batch_equals_one_by_one(tokenizer):
    assert tokenizer.encode_batch(HARD) == [tokenizer.encode(text) for text in HARD]
    assert tokenizer.encode_batch([]) == []


def test_pieces_from_the_cache_are_the_librarys_own_ids(path, monkeypatch):
    """Mixtures of spaces, letters, digits, signs and contractions; the small cache is cleared several times."""
    monkeypatch.setattr("megalin.data.tokenizers.word_cache._MOST_PIECES", 500)
    tokenizer, library = HuggingFaceTokenizer(path), LibraryTokenizer.from_file(str(path))
    library.encode_special_tokens = True
    rng = np.random.default_rng(0)
    alphabet = [
        *(chr(code) for code in range(0x110000) if chr(code).isspace() or 0x1C <= code <= 0x1F),
        *" \n\t" * 8,
        *"ab1'!é日🙂\u0301\u200b\ufeff\x00",
        "'s",
        "'ll",
        "<|endoftext|>",
        "the cat",
        "x" * 70,
    ]
    for _ in range(40):
        texts = ["".join(rng.choice(alphabet, rng.integers(0, 200))) for _ in range(25)]
        expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
        assert tokenizer.encode_batch(texts) == expected
    assert len(tokenizer._cache._ids) <= 500 + 25 * 200
    assert not any(len(piece) > 64 for piece in tokenizer._cache._ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": "e c"}, "content": "X"}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("added_tokens", "e cat"),
    ],
)
def test_batch_equals_the_library_for_tokenizers_that_cut_otherwise(path, tmp_path, field, value):
    description = json.loads(path.read_bytes())
    if field == "added_tokens":
        last = {**description["added_tokens"][0], "id": 1000, "content": value, "special": False}
        description["added_tokens"].append(last)
    else:
        description[field] = value
    (tmp_path / "t.json").write_text(json.dumps(description))
    library = LibraryTokenizer.from_file(str(tmp_path / "t.json"))
    library.encode_special_tokens = True
    expected = [encoding.ids for encoding in library.encode_batch(HARD, add_special_tokens=False)]
    assert HuggingFaceTokenizer(tmp_path / "t.json").encode_batch(HARD) == expected


def test_any_token_ends_documents_by_its_text_or_id(request, path, gpt2, ranks, sentencepiece_model):
    for files, text in (
        (tokenizer_files("bytes"), "<|endoftext|>"),
        (tokenizer_files(str(path)), "the"),
        (gpt2, "the"),
        (TokenizerFiles("tiktoken", (str(ranks),), "gpt2"), "the"),
        (tokenizer_files(str(sentencepiece_model)), "<unk>"),
    ):
        by_text = files._replace(eod_token=text).load()
        assert by_text.eod_id == by_text.token_id(text)
        for number in (by_text.eod_id, 7):
            for given in (number, str(number)):
                assert files._replace(eod_token=given).load().eod_id == number
        for given in ("<|none|>", 1 << 22):
            with pytest.raises(DataError, match=rf"has no (token|id) '?{re.escape(str(given))}'? to end a document"):
                files._replace(eod_token=given).load()


def test_end_of_document_has_an_id_of_no_bytes(tokenizer):
    assert tokenizer.token_bytes()[tokenizer.eod_id] == 0
    assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes().dtype == np.int64
    assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"


def test_broken_characters_decode_without_error(tokenizer):
    assert "�" in tokenizer.decode(tokenizer.encode("日")[:1])


def test_bytes_are_their_own_ids():
    assert ByteTokenizer().encode("aé") == [97, 195, 169]


def test_training_learns_merges_and_repeats_itself(path, tmp_path):
    tokenizer = HuggingFaceTokenizer(path)
    assert 257 < tokenizer.vocab_size <= 400
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    BytePairTrainer(400).train(iter(TEXTS * 3)).save(tmp_path / "again.json")
    assert HuggingFaceTokenizer(tmp_path / "again.json").digest == tokenizer.digest


def test_training_stops_where_no_pair_is_left():
    trainer = BytePairTrainer(10_000).train(["aaaa bb"])
    assert 257 <= trainer.vocab_size < 300


@pytest.mark.parametrize("vocab_size", [256, 2**22 + 1])
def test_impossible_vocabulary_size_is_refused(vocab_size):
    with pytest.raises(ConfigError, match=f"vocab_size = {vocab_size}: a byte-level BPE needs 257 to 4194304 ids"):
        BytePairTrainer(vocab_size)


def test_pattern_on_which_the_library_panics_is_an_error_of_the_file(path, tmp_path, capfd):
    description = json.loads(path.read_text())
    pattern = "(a|aa|a?)+$|" + "(a*)*" * 8 + "b"
    description["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match=r"tokenizer\.json: its library gave up on this tokenizer: .*retry-limit"):
            encode("a" * 64 + "!")


def test_text_on_which_tiktoken_panics_is_an_error_with_a_remedy(ranks, capfd):
    tokenizer = TokenizerFiles("tiktoken", (str(ranks),), "gpt2", 1000).load()
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(DataError, match=r"t\.tiktoken: its library .*; it takes no run of a million spaces"):
            encode(" " * 1_000_000 + "a")


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_training_on_nothing_is_refused(texts):
    with pytest.raises(DataError, match="empty corpus: no text to train a tokenizer on"):
        BytePairTrainer(300).train(texts)


def test_padding_truncation_and_added_tokens_of_the_file_are_off(path, tmp_path):
    library = LibraryTokenizer.from_file(str(path))
    library.enable_truncation(max_length=3)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "t.json"))
    assert HuggingFaceTokenizer(tmp_path / "t.json").encode(TEXTS[0]) == HuggingFaceTokenizer(path).encode(TEXTS[0])


@pytest.mark.parametrize("data", [b"", b"[", b"{}", b"\xff\xfe", b'{"model": null}', b"[" * 100_000, b"\x80\x04K\x01."])
def test_file_that_is_no_tokenizer_is_refused(tmp_path, data):
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(DataError, match=r"t\.json: not a tokenizer\.json: "):
        load_tokenizer(str(tmp_path / "t.json"))


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json: no such file; give the path of a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "none.json"))


def test_huge_tokenizer_file_is_not_read(tmp_path):
    (tmp_path / "t.json").touch()
    os.truncate(tmp_path / "t.json", 2**40)
    with pytest.raises(DataError, match="expected at most 67108864 bytes, found 1099511627776"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_tokenizer_without_an_end_of_document_is_refused(tmp_path):
    LibraryTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"t\.json: has no token <\|endoftext\|>; name the token"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_huge_token_id_is_refused(tmp_path):
    library = LibraryTokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="a"))
    values = json.loads(library.to_str())
    values["model"]["vocab"]["<|endoftext|>"] = 2**31
    (tmp_path / "t.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="expected token ids below 4194304; found 2147483648"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_bytes_per_token_need_a_byte_level_tokenizer(tmp_path):
    LibraryTokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"t\.json: bytes per token need a byte-level tokenizer"):
        load_tokenizer(str(tmp_path / "t.json")).token_bytes()


def test_added_words_count_their_own_bytes(path, tmp_path):
    library = LibraryTokenizer.from_file(str(path))
    library.add_tokens(["é🙂"])
    library.add_special_tokens(["<|extra|>"])
    library.save(str(tmp_path / "t.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "t.json")
    vocabulary = json.loads((tmp_path / "t.json").read_bytes())["added_tokens"]
    ids = {entry["content"]: entry["id"] for entry in vocabulary}
    assert tokenizer.token_bytes()[ids["é🙂"]] == 6
    assert tokenizer.token_bytes()[ids["<|extra|>"]] == 0
