"""Token that ends a document of Hugging Face tokenizers and their folders, and the ids of their post-processors."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, processors

from megalin.data.config import DataConfig
from megalin.data.datasets.token import open_parts
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.tokenizers.tokenizer import HuggingFaceTokenizer, load_tokenizer, tokenizer_of
from megalin.errors import ConfigError, DataError
from megalin.generation.prompts import encode_prompts
from megalin.train.validation import bytes_per_token
from tools import preprocess_data

TOKENS = ["a", "</s>", "<|end_of_text|>", "<s>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer.json without `<|endoftext|>` whose post-processor adds BOS, as LLaMA 3's."""
    library = LibraryTokenizer(models.WordLevel({name: index for index, name in enumerate(TOKENS)}, unk_token="a"))
    library.add_special_tokens(TOKENS[1:])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, 1),
        ({"special_tokens_map.json": {"eos_token": {"content": "<|end_of_text|>", "lstrip": False}}}, 2),
        ({"tokenizer_config.json": {"eos_token": "</s>"}, "special_tokens_map.json": {"eos_token": "<s>"}}, 1),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<s>"}}, 3),
    ],
)
def test_folder_names_the_end_of_a_document(folder: Path, files: dict[str, Any], expected: int):
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    for path in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(str(path)).eod_id == expected
    assert load_tokenizer(str(folder), "<s>").eod_id == 3


def test_token_without_a_place_in_the_vocabulary_is_named(folder: Path):
    with pytest.raises(DataError, match=r"has no token <\|endoftext\|>; name the token .* or data.eod_token"):
        load_tokenizer(str(folder))
    with pytest.raises(DataError, match="has no token '<eos>' to end a document"):
        load_tokenizer(str(folder), "<eos>")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    with pytest.raises(DataError, match="or <eos>, which its folder names"):
        load_tokenizer(str(folder))
    with pytest.raises(DataError, match="bytes: has no token '<eos>' to end a document"):
        load_tokenizer("bytes", "<eos>")


@pytest.mark.parametrize("text", ["[", "[1]", '"x"'])
def test_bad_settings_are_refused(folder: Path, text: str):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not a JSON object"):
        load_tokenizer(str(folder))


def test_ids_of_the_post_processor_are_kept_only_on_request(folder: Path):
    plain, special = (load_tokenizer(str(folder), "</s>", special_tokens=special) for special in (False, True))
    assert (plain.encode("a"), plain.encode_batch(["a"])) == ([0], [[0]])
    assert (special.encode("a"), special.encode_batch(["a"])) == ([3, 0], [[3, 0]])
    assert plain.digest == special.digest  # the same ids


def test_only_the_ids_before_a_text_begin_a_prompt(folder: Path):
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    around = "<s> <s> $A </s>"
    library.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 3), ("</s>", 1)])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(folder, eod_token="</s>")
    assert load_tokenizer(str(folder), "</s>", special_tokens=True).encode("a") == [3, 3, 0, 1]
    assert encode_prompts(tokenizer, ["a", ""], special_tokens=True) == [[3, 3, 0], [3, 3]]
    assert encode_prompts(tokenizer, ["a", ""], special_tokens=False) == [[0], []]
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.save(str(folder / "tokenizer.json"))
    for each in (HuggingFaceTokenizer(folder, eod_token="</s>"), load_tokenizer("bytes")):
        with pytest.raises(ConfigError, match="this tokenizer adds none before a text; leave --special-tokens"):
            encode_prompts(each, ["a"], special_tokens=True)


def test_preprocess_writes_the_ids_of_megatron(folder: Path, caplog: pytest.LogCaptureFixture):
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    flags = ["--input", str(folder / "text.jsonl"), "--tokenizer-model", str(folder), "--append-eod"]
    flags += ["--eod-token", "<|end_of_text|>", "--special-tokens"]
    assert preprocess_data.main([*flags, "--output-prefix", str(folder / "shard")]) == 0
    with Shard(folder / "shard_text_document") as shard:
        assert list(shard.read(0, 3)) == [3, 0, 2]
    manifest = json.loads((folder / "shard_text_document.manifest.json").read_text())
    assert (manifest["tokenizer"]["eod_id"], manifest["tokenizer"]["special_tokens"]) == (2, True)
    config = DataConfig(train=["x"], sequence_length=1, tokenizer=str(folder), eod_token="</s>", special_tokens=False)
    for special_tokens in (None, True, False):
        changed = config.model_copy(update={"special_tokens": special_tokens})
        refused = pytest.raises(
            DataError, match=r"made with --special-tokens, but data\.special_tokens = False; set it to"
        )
        with ExitStack() as stack, refused if special_tokens is False else nullcontext():
            open_parts(changed, "train", 4, [str(folder / "shard_text_document")], stack)
    for eod_token, warned in (("</s>", True), (2, False)):
        caplog.clear()
        with ExitStack() as stack:
            other_end = config.model_copy(update={"special_tokens": None, "eod_token": eod_token})
            open_parts(other_end, "train", 4, [str(folder / "shard_text_document")], stack)
        assert ("its documents end with the id 2, but texts of this run with 1" in caplog.text) == warned
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "text": "aa"}\n{"prompt": "a", "text": ""}\n')
    pairs = ["--input", str(folder / "pairs.jsonl"), *flags[2:], "--prompt-key", "prompt"]
    assert preprocess_data.main([*pairs, "--output-prefix", str(folder / "pairs")]) == 0
    with Shard(folder / "pairs_text_document") as shard:
        assert list(shard.read(0, shard.num_tokens)) == [3, 0, 0, 2]  # BOS before the prompt alone
    other = ["--input", str(folder / "text.jsonl"), "--tokenizer-type", "ByteTokenizer", "--output-prefix", "x"]
    assert preprocess_data.main([*other, "--eod-token", "x"]) == 3
    assert preprocess_data.main([*other, "--special-tokens"]) == 2


def test_bits_per_byte_are_left_out_where_ids_have_no_fixed_bytes(folder: Path, caplog: pytest.LogCaptureFixture):
    data = DataConfig(train=["x"], sequence_length=8, tokenizer=str(folder), eod_token="</s>")
    assert bytes_per_token(tokenizer_of(data)) is None
    assert "no bits per byte" in caplog.text
