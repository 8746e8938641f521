"""Command lines of the data tools: output, exit codes, and errors without a traceback."""

import json
import os
import pty
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest

from megalin.data.shards import tokenization
from megalin.data.tokenizers.tokenizer import HuggingFaceTokenizer
from tests.data.shard_files import write_by_hand
from tools import inspect_shards, preprocess_data, train_tokenizer

TOOLS = Path(inspect_shards.__file__).parent


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"the quick brown fox number {k}"}) for k in range(30)]
    path.write_text("\n".join([*lines, "not json"]))
    return path


def _preprocess(tmp_path, corpus, *more):
    arguments = ["--input", str(corpus), "--output-prefix", str(tmp_path / "out"), *more]
    return preprocess_data.main([*arguments])


def test_tools_work_from_text_to_a_described_shard(tmp_path, corpus, capsys):
    tokenizer = str(tmp_path / "t.json")
    assert train_tokenizer.main(["--input", str(corpus), "--vocab-size", "290", "--output", tokenizer]) == 0
    assert capsys.readouterr() == (f"290 ids: {tokenizer}\n", "left out: 1 x not JSON\n")
    assert _preprocess(tmp_path, corpus, "--tokenizer-model", tokenizer, "--append-eod", "--log-interval", "10") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("30 documents, ")
    assert "30 documents (" in shown.err
    assert f"bad line: {corpus}:31: not JSON: Expecting value" in shown.err
    assert "left out: 1 x not JSON" in shown.err
    prefix = str(tmp_path / "out_text_document")
    assert inspect_shards.main([prefix, "--json", "--tokenizer-model", tokenizer, "--validate"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["sequences"], summary["dtype"]) == (30, 30, "uint16")
    assert summary["validated"] is True
    assert summary["first_text"].startswith("the quick brown fox number 0<|endoftext|>the")
    assert set(summary["lengths"]) == {"min", "median", "mean", "max"}
    assert len(summary["digest"]) == 64


def test_prompts_and_answers_become_a_shard_with_a_mask(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{k}+1=", "answer": str(k + 1)}) for k in range(8)))
    keys = ["--prompt-key", "prompt", "--json-keys", "answer", "--append-eod", "--tokenizer-type", "ByteTokenizer"]
    assert _preprocess(tmp_path, path, *keys) == 0
    prefix = str(tmp_path / "out_answer_document")
    assert capsys.readouterr().out == f"8 documents, 48 tokens, 16 of them labels: {prefix}\n"
    assert inspect_shards.main([prefix, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["tokens"], summary["label_tokens"], summary["label_fraction"]) == (48, 16, 16 / 48)
    assert inspect_shards.main([prefix]) == 0
    assert "33.33%" in capsys.readouterr().out
    os.truncate(f"{prefix}.mask.bin", 20)
    assert inspect_shards.main([prefix]) == 3
    assert f"Error: {prefix}.mask.bin: expected 22 bytes for 48 tokens; found 20 bytes" in capsys.readouterr().err


def test_summary_is_readable_and_free_of_control_characters(tmp_path, capsys):
    prefix = write_by_hand(tmp_path / "x", [[27, 91, 51, 49, 109, 104, 105]])
    assert inspect_shards.main([str(prefix), "--tokenizer-model", "bytes", "--validate", "--vocab-size", "200"]) == 0
    shown = capsys.readouterr().out
    assert "documents" in shown
    assert r"\x1b[31mhi" in shown
    assert "\x1b[31m" not in shown
    assert "all 7 token ids are below 200" in shown


def test_bad_shard_ends_with_one_line_and_no_traceback(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1, 2, 3]])
    os.truncate(f"{prefix}.bin", 5)
    command = [sys.executable, str(TOOLS / "inspect_shards.py"), str(prefix)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert f"Error: {prefix}.bin: expected 6 bytes" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--vocab-size", "9"], 2, "--vocab-size has no effect without --validate"),
        (["--validate"], 2, "--validate needs --vocab-size V of at least 1, or --tokenizer-model"),
        (["--validate", "--vocab-size", "0"], 2, "--validate needs --vocab-size V of at least 1"),
        (["--validate", "--vocab-size", "3"], 3, "token id 3 at offset 2 of sequence 0"),
        (["--tokenizer-model", "none.json"], 3, "none.json: no such file"),
    ],
)
def test_inspection_that_cannot_work_is_refused(tmp_path, capsys, arguments, code, message):
    prefix = write_by_hand(tmp_path / "x", [[1, 2, 3]])
    assert inspect_shards.main([str(prefix), *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model"),
        (["--tokenizer-type", "ByteTokenizer", "--tokenizer-model", "t.json"], 2, "takes no --tokenizer-model"),
        (["--tokenizer-type", "ByteTokenizer", "--log-interval", "0"], 2, "--log-interval 0: must be at least 1"),
        (["--tokenizer-type", "ByteTokenizer", "--json-keys", "body"], 3, "empty corpus: 0 documents"),
        (["--tokenizer-type", "ByteTokenizer", "--on-bad-line", "fail"], 3, "corpus.jsonl:31: not JSON"),
        (["--tokenizer-model", "none.json"], 3, "none.json: no such file"),
    ],
)
def test_preprocessing_that_cannot_work_is_refused(tmp_path, corpus, capsys, arguments, code, message):
    assert _preprocess(tmp_path, corpus, *arguments) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out_*"))
    if code == 2:
        assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v"], "GPT2BPETokenizer needs --merge-file"),
        (["--tokenizer-type", "ByteTokenizer", "--tiktoken-pattern", "gpt2"], "takes no --tiktoken-pattern"),
        (["--tokenizer-type", "ByteTokenizer", "--shard", "1"], "--shard 1: give I/N, as 0/8 to 7/8"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, corpus, capsys, arguments, message):
    assert _preprocess(tmp_path, corpus, *arguments) == 2
    assert message in capsys.readouterr().err


def test_shards_of_several_hosts_are_merged(tmp_path, corpus, capsys):
    common = ["--tokenizer-type", "ByteTokenizer"]
    for number in (0, 1):
        assert _preprocess(tmp_path, corpus, *common, "--shard", f"{number}/2") == 0
        assert f"shard {number}/2 is done; after the last one, run again with --resume" in capsys.readouterr().out
    assert not list(tmp_path.glob("out_*"))
    assert _preprocess(tmp_path, corpus, *common, "--resume") == 0
    assert capsys.readouterr().out.startswith("30 documents, ")


def _under_mpi(monkeypatch, world):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(COMM_WORLD=world))


@pytest.mark.parametrize(("failed", "code", "written"), [(0, 0, True), (3, 3, False)])
def test_first_rank_of_mpi_merges_the_shards_of_all_ranks(tmp_path, corpus, monkeypatch, failed, code, written):
    class World:
        Get_rank, Get_size = staticmethod(lambda: 0), staticmethod(lambda: 2)
        allgather, bcast = staticmethod(lambda code: [code, failed]), staticmethod(lambda code: code)

    common = ["--tokenizer-type", "ByteTokenizer"]
    assert _preprocess(tmp_path, corpus, *common, "--shard", "1/2") == 0  # the other rank
    _under_mpi(monkeypatch, World)
    assert _preprocess(tmp_path, corpus, *common) == code
    assert (tmp_path / "out_text_document.idx").exists() == written


@pytest.fixture
def second_rank(monkeypatch):
    world = Mock()
    world.Get_rank.return_value, world.Get_size.return_value = 1, 2
    world.allgather.return_value, world.bcast.return_value = [0, 0], 0
    _under_mpi(monkeypatch, world)
    return world


def test_ranks_of_mpi_after_the_first_show_no_progress(tmp_path, corpus, monkeypatch, capsys, second_rank):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a bar, as on a terminal
    assert _preprocess(tmp_path, corpus, "--tokenizer-type", "ByteTokenizer") == 0
    second_rank.allgather.assert_called_once_with(0)
    assert "tokenising" not in capsys.readouterr().err


def test_error_that_is_not_the_users_ends_all_ranks_of_mpi(tmp_path, corpus, monkeypatch, capsys, second_rank):
    monkeypatch.setattr(tokenization, "preprocess", Mock(side_effect=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        _preprocess(tmp_path, corpus, "--tokenizer-type", "ByteTokenizer")
    second_rank.Abort.assert_called_once_with(1)
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_training_that_cannot_work_is_refused(tmp_path, corpus, capsys):
    output = ["--output", str(tmp_path / "t.json")]
    assert train_tokenizer.main(["--input", str(corpus), "--vocab-size", "9", *output]) == 2
    assert train_tokenizer.main(["--input", str(corpus), "--json-keys", "x", "--vocab-size", "300", *output]) == 3
    assert "empty corpus" in capsys.readouterr().err
    arguments = ["--input", str(corpus), "--vocab-size", "300", "--max-document-bytes", "9", *output]
    assert train_tokenizer.main(arguments) == 3
    assert "left out: 30 x too long\n" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_characters_of_a_file_become_single_tokens(tmp_path, corpus, capsys):
    alphabet, output = tmp_path / "alphabet.txt", tmp_path / "t.json"
    alphabet.write_text("\ufeff\u4e2d\n\u56fd\n\u00e9\u4e2d\n")  # with a byte order mark
    arguments = ["--input", str(corpus), "--vocab-size", "290", "--initial-alphabet", str(alphabet)]
    assert train_tokenizer.main([*arguments, "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"290 ids: {output}\n"
    tokenizer = HuggingFaceTokenizer(output)
    assert [len(tokenizer.encode(character)) for character in "\u4e2d\u56fd\u00e9\u4eba\ufeff"] == [1, 1, 1, 3, 3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty; write the characters to add into it, one a line or all together"),
        (b"abc\n", "has ASCII characters alone, which are single tokens in any case; write the characters"),
        (b"\xe4\xb8\n", "not UTF-8: invalid continuation byte at byte 0; convert the file to UTF-8"),
        (None, "no such file"),
    ],
)
def test_alphabet_that_adds_nothing_is_refused(tmp_path, corpus, capsys, data, message):
    alphabet, output = tmp_path / "alphabet.txt", tmp_path / "t.json"
    if data is not None:
        alphabet.write_bytes(data)
    arguments = ["--input", str(corpus), "--vocab-size", "290", "--initial-alphabet", str(alphabet)]
    assert train_tokenizer.main([*arguments, "--output", str(output)]) == 3
    assert f"{alphabet}: {message}" in capsys.readouterr().err
    assert not output.exists()


def test_terminal_gets_a_progress_bar(tmp_path, corpus):
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(corpus), "--output-prefix"]
    command += [str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer"]
    leader, follower = pty.openpty()
    subprocess.run(command, check=True, stderr=follower, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"})
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    os.close(follower)
    assert "30 documents" in shown
    assert "1 bad lines" in shown
