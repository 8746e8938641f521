"""Tokenizers: round trips, the end of a document, bytes a token, and hostile files."""

import json
import os

import numpy as np
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from megalin.data.tokenizer import BytePairTrainer, ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
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


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, path):
    return load_tokenizer("bytes" if request.param == "bytes" else str(path))


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
    with pytest.raises(DataError, match=r"t\.json: has no token <\|endoftext\|>; add it as a special token"):
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
