"""Tokenization of text into shards: golden output, equal for any number of workers, and no output after a failure."""

import hashlib
import itertools
import json
import multiprocessing.connection
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalin.data.corpus import parts
from megalin.data.corpus.parts import PartSubset
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.shards.tokenization import PreprocessOptions, preprocess
from megalin.data.tokenizers.tokenizer import BytePairTrainer, ByteTokenizer, TokenizerFiles
from megalin.errors import ConfigError, DataError
from tests.data.shard_files import assert_mask_is_sealed, index_bytes, mask_bytes


def _options(tmp_path, **values):
    defaults = {
        "json_keys": ["text"],
        "output_prefix": str(tmp_path / "out"),
        "tokenizer": TokenizerFiles("bytes"),
        "append_eod": False,
        "workers": 1,
        "on_bad_line": "skip",
        "limit_bytes": 1 << 20,
    }
    return PreprocessOptions(**{**defaults, **values})


def _jsonl(tmp_path, lines, name="x.jsonl"):
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / name).write_text("\n".join(rows))
    return tmp_path / name


def _documents(prefix):
    with Shard(prefix) as shard:
        first = [shard.first_token(int(sequence)) for sequence in shard.documents]
        return [shard.read(a, b - a).tolist() for a, b in itertools.pairwise(first)]


def test_shard_is_the_golden_one(tmp_path):
    path = _jsonl(tmp_path, [{"text": "ab"}, {"text": ""}, {"text": "c"}])
    report = preprocess([path], _options(tmp_path, append_eod=True))
    assert report.prefixes == [f"{tmp_path}/out_text_document"]
    assert (report.documents, report.tokens, report.bad_lines) == (3, 5, {})
    assert (tmp_path / "out_text_document.bin").read_bytes() == bytes.fromhex("6100 6200 0001 6300 0001")
    assert (tmp_path / "out_text_document.idx").read_bytes() == index_bytes([3, 2], [0, 1, 1, 2])


def test_supervised_shard_is_the_golden_one(tmp_path):
    lines = [{"q": "ab", "a": "c"}, {"q": "x", "a": ""}, {"q": "", "a": "yz"}, {"a": "no prompt"}, {"q": "d", "a": "é"}]
    report = preprocess([_jsonl(tmp_path, lines)], _options(tmp_path, json_keys=["a"], prompt_key="q", append_eod=True))
    assert (report.documents, report.tokens, report.label_tokens) == (4, 11, 8)
    assert report.bad_lines == {"key missing": 1}
    assert _documents(report.prefixes[0]) == [[97, 98, 99, 256], [], [121, 122, 256], [100, 195, 169, 256]]
    bits = [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    assert Path(f"{report.prefixes[0]}.mask.bin").read_bytes() == mask_bytes(bits)
    manifest = json.loads(Path(f"{report.prefixes[0]}.manifest.json").read_text())
    assert (manifest["prompt_key"], manifest["label_tokens"], manifest["tokens"]) == ("q", 8, 11)
    assert_mask_is_sealed(report.prefixes[0])


def test_each_key_has_its_own_mask_after_the_same_prompt(tmp_path):
    path = _jsonl(tmp_path, [{"q": "ab", "a": "c", "b": "de"}])
    report = preprocess([path], _options(tmp_path, json_keys=["a", "b"], prompt_key="q"))
    assert [_documents(prefix) for prefix in report.prefixes] == [[[97, 98, 99]], [[97, 98, 100, 101]]]
    masks = [Path(f"{prefix}.mask.bin").read_bytes() for prefix in report.prefixes]
    assert masks == [mask_bytes([0, 0, 1]), mask_bytes([0, 0, 1, 1])]
    assert report.label_tokens == 3


def test_masks_of_parts_are_joined_and_none_is_written_without_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_LEAST_PART_BYTES", 1000)
    path = _jsonl(tmp_path, [{"q": "x" * (k % 7), "a": "y" * (k % 5)} for k in range(300)])
    assert len(parts.plan([path])) > 1
    report = preprocess([path], _options(tmp_path, json_keys=["a"], prompt_key="q", append_eod=True))
    bits = [bit for k in range(300) if k % 5 for bit in [0] * (k % 7) + [1] * (k % 5 + 1)]
    assert (tmp_path / "out_a_document.mask.bin").read_bytes() == mask_bytes(bits)
    assert_mask_is_sealed(tmp_path / "out_a_document")
    assert report.label_tokens == sum(bits)
    report = preprocess([path], _options(tmp_path, json_keys=["a"]))
    assert report.label_tokens is None
    assert not (tmp_path / "out_a_document.mask.bin").exists()


def test_documents_do_not_end_with_eod_unless_asked(tmp_path):
    preprocess([_jsonl(tmp_path, [{"text": "ab"}])], _options(tmp_path))
    assert _documents(tmp_path / "out_text_document") == [[97, 98]]


def test_each_key_gives_an_aligned_shard(tmp_path):
    path = _jsonl(tmp_path, [{"a": "1", "b": "2"}, {"a": "bad"}, {"b": "4", "a": "3"}])
    report = preprocess([path], _options(tmp_path, json_keys=["a", "b"]))
    assert _documents(report.prefixes[0]) == [[ord("1")], [ord("3")]]
    assert _documents(report.prefixes[1]) == [[ord("2")], [ord("4")]]


def test_manifest_records_tokenizer_and_bad_lines(tmp_path):
    path = _jsonl(tmp_path, [{"text": "ab"}, "bad", "", {"text": 1}, "bad"])
    report = preprocess([path], _options(tmp_path))
    manifest = json.loads((tmp_path / "out_text_document.manifest.json").read_text())
    assert manifest["tokenizer"]["digest"] == ByteTokenizer.digest
    assert (manifest["documents"], manifest["sequences"], manifest["tokens"]) == (1, 1, 2)
    assert manifest["bad_lines"] == report.bad_lines == {"blank line": 1, "not JSON": 2, "not a string": 1}
    assert manifest["first_bad_lines"][0].startswith(f"{path}:2: not JSON")
    assert [bad.line for bad in report.listed] == [2, 3, 4, 5]


def test_bad_line_stops_where_asked_and_a_blank_one_does_not(tmp_path):
    path = _jsonl(tmp_path, [{"text": "ab"}, "", "bad"])
    with pytest.raises(DataError, match=r"x\.jsonl:3: not JSON: .*; fix the line, or skip bad lines"):
        preprocess([path], _options(tmp_path, on_bad_line="fail"))
    assert not list(tmp_path.glob("out_*"))


@pytest.mark.parametrize("lines", [[], [""], ["bad", {"text": ""}]])
def test_empty_corpus_is_refused_and_leaves_nothing(tmp_path, lines):
    with pytest.raises(DataError, match=r"out_text_document: empty corpus: \d documents without a token \(bad lines: "):
        preprocess([_jsonl(tmp_path, lines)], _options(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.jsonl"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"json_keys": ["a", "a"]}, "--json-keys a a: give each key once"),
        ({"json_keys": []}, "give each key once"),
        ({"json_keys": ["../a"]}, r"--json-keys \.\./a: a key is part of a file name"),
        ({"json_keys": ["a", "q"], "prompt_key": "q"}, "--prompt-key q: also one of --json-keys a q; name the key of"),
        ({"workers": 0}, "--workers 0: must be at least 1"),
        ({"limit_bytes": 0}, "--max-document-bytes 0: must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        preprocess([_jsonl(tmp_path, [{"text": "a"}])], _options(tmp_path, **values))


def test_plain_text_takes_one_key(tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(
        ConfigError, match=r"--prompt-key q: .*x\.txt is plain text; give jsonl or parquet with a prompt"
    ):
        preprocess([tmp_path / "x.txt"], _options(tmp_path, prompt_key="q"))
    with pytest.raises(ConfigError, match=r"--json-keys a b: .*x\.txt is plain text; give a single key"):
        preprocess([tmp_path / "x.txt"], _options(tmp_path, json_keys=["a", "b"]))
    preprocess([tmp_path / "x.txt"], _options(tmp_path, json_keys=["a"]))
    assert _documents(tmp_path / "out_a_document") == [list(b"hello")]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "_LEAST_PART_BYTES", 700)


@pytest.fixture
def mixed(tmp_path):
    """Two files of documents with one bad line in nine; the folder also has a tokenizer for them."""
    rng = np.random.default_rng(0)
    words = ["alpha ", "beta ", "gamma ", "日本 ", "<|endoftext|>", "\n"]
    texts = ["".join(rng.choice(words, rng.integers(0, 40))) for _ in range(200)]
    lines = [{"text": text} if k % 9 else "bad" for k, text in enumerate(texts)]
    BytePairTrainer(300).train(texts).save(tmp_path / "t.json")
    return [_jsonl(tmp_path, lines[:120], "a.jsonl"), _jsonl(tmp_path, lines[120:], "b.jsonl")]


def _written(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_output_is_the_same_for_any_number_of_workers_and_parts(tmp_path, mixed, monkeypatch):
    written = []
    for workers, least in ((1, 1 << 20), (1, 500), (2, 1500)):
        monkeypatch.setattr(parts, "_LEAST_PART_BYTES", least)
        folder = tmp_path / str(least)
        folder.mkdir()
        files = TokenizerFiles("huggingface", (str(tmp_path / "t.json"),))
        seen = []
        options = _options(folder, tokenizer=files, append_eod=True, workers=workers)
        report = preprocess(mixed, options, on_progress=seen.append)
        assert seen[-1].documents == report.documents == 200 - len(range(0, 200, 9))
        assert seen[-1].tokens == report.tokens
        assert seen[-1].bad_lines == sum(report.bad_lines.values())
        assert seen[-1].read_bytes == sum(path.stat().st_size for path in mixed)
        assert [bad.line for bad in report.listed if bad.path == str(mixed[0])] == list(range(1, 121, 9))
        written.append(_written(folder))
    assert written[0] == written[1] == written[2]
    assert sorted(written[0]) == [f"out_text_document.{suffix}" for suffix in ("bin", "idx", "manifest.json")]
    manifest = json.loads(written[0]["out_text_document.manifest.json"])
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in mixed]
    assert [entry["sha256"] for entry in manifest["inputs"]] == digests
    assert [entry["bytes"] for entry in manifest["inputs"]] == [path.stat().st_size for path in mixed]
    assert sum(entry["documents"] for entry in manifest["inputs"]) == manifest["documents"]


@pytest.mark.usefixtures("small_parts")
def test_merged_subsets_are_the_bytes_of_one_run(tmp_path, mixed):
    (tmp_path / "one").mkdir()
    preprocess(mixed, _options(tmp_path / "one"))
    (tmp_path / "many").mkdir()
    taken = set()
    for number in (2, 0, 1):
        assert preprocess(mixed, _options(tmp_path / "many", subset=PartSubset(number, 3))) is None
        assert not list((tmp_path / "many").glob("out_*"))
        mine = {int(path.stem) for path in (tmp_path / "many" / "out.parts").glob("[0-9]*.json")} - taken
        assert {k % 3 for k in mine} == {number}
        taken |= mine
    seen = []
    report = preprocess(mixed, _options(tmp_path / "many", resume=True), on_progress=seen.append)
    assert [state.documents for state in seen] == [report.documents]  # no part was left to do
    assert report.documents == 200 - len(range(0, 200, 9))
    assert _written(tmp_path / "one") == _written(tmp_path / "many")


@pytest.mark.usefixtures("small_parts")
def test_resumed_run_does_only_what_is_left(tmp_path, mixed):
    class StoppedError(Exception):
        pass

    def stop(progress):
        if progress.documents > 60:
            raise StoppedError

    (tmp_path / "one").mkdir()
    preprocess(mixed, _options(tmp_path / "one"))
    (tmp_path / "two").mkdir()
    with pytest.raises(StoppedError):
        preprocess(mixed, _options(tmp_path / "two"), on_progress=stop)
    seen = []
    preprocess(mixed, _options(tmp_path / "two", resume=True), on_progress=seen.append)
    assert seen[0].documents > 40  # kept from before
    assert _written(tmp_path / "one") == _written(tmp_path / "two")


@pytest.mark.usefixtures("small_parts")
def test_run_killed_while_it_removes_its_parts_can_be_resumed(tmp_path, mixed, monkeypatch):
    class KilledError(Exception):
        pass

    def remove_some(folder):
        for path in folder.glob("*.bin"):
            path.unlink()
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(parts.shutil, "rmtree", remove_some)
        with pytest.raises(KilledError):
            preprocess(mixed, _options(tmp_path))
    published = (tmp_path / "out_text_document.bin").read_bytes()
    preprocess(mixed, _options(tmp_path, resume=True))
    assert (tmp_path / "out_text_document.bin").read_bytes() == published
    assert [path.name for path in tmp_path.glob("out.*")] == []


@pytest.mark.usefixtures("small_parts")
def test_resume_refuses_parts_of_other_settings_or_files(tmp_path, mixed):
    preprocess(mixed, _options(tmp_path, subset=PartSubset(0, 2)))
    with pytest.raises(DataError, match="made with another append_eod: False, now True; remove the folder"):
        preprocess(mixed, _options(tmp_path, subset=PartSubset(1, 2), append_eod=True))
    with pytest.raises(DataError, match=rf"made with another order of inputs: {mixed[0]}, now {mixed[1]}; remove"):
        preprocess([mixed[1], mixed[0], *mixed[2:]], _options(tmp_path, resume=True))
    os.utime(mixed[1], ns=(0, 0))
    with pytest.raises(DataError, match=r"made with another input .*b\.jsonl: "):
        preprocess(mixed, _options(tmp_path, resume=True))
    assert preprocess(mixed, _options(tmp_path)).documents  # without resume it starts again


def test_damaged_record_is_refused(tmp_path, mixed):
    preprocess(mixed, _options(tmp_path, subset=PartSubset(0, 1)))
    (tmp_path / "out.parts" / "000000.json").write_text("[")
    with pytest.raises(DataError, match=r"000000\.json: not a JSON object; remove .*out\.parts and start again"):
        preprocess(mixed, _options(tmp_path, resume=True))


@pytest.mark.parametrize(("number", "total"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_subset_is_refused(tmp_path, number, total):
    with pytest.raises(ConfigError, match=f"--shard {number}/{total}: give i/n with i from 0 to n - 1"):
        preprocess([_jsonl(tmp_path, [{"text": "a"}])], _options(tmp_path, subset=PartSubset(number, total)))


def _end_abruptly(job, part, folder, report):
    os._exit(1)


def test_worker_that_dies_is_reported(tmp_path, mixed, monkeypatch):
    monkeypatch.setattr(parts, "_LEAST_PART_BYTES", 700)
    run = parts.Run(tmp_path / "p", {}, 2, False, None, lambda _: None)
    with pytest.raises(DataError, match=r"a worker process died .*; use fewer --workers or lower --max-document-bytes"):
        parts.run_parts(_end_abruptly, None, parts.plan(mixed), run)


_RUN = """
import sys
from pathlib import Path
from megalin.data.corpus import parts
from megalin.data.shards import tokenization
from megalin.data.tokenizers.tokenizer import TokenizerFiles
parts._LEAST_PART_BYTES = {least}
parts._REPORT_SECONDS = 0.01
def print_progress(progress):
    print(progress.documents, flush=True)
    if progress.documents >= 50 and {stop}: sys.stdin.read()
if __name__ == "__main__":
    options = tokenization.PreprocessOptions(
        ["text"], sys.argv[2], TokenizerFiles("bytes"), True, int(sys.argv[3]), "skip", 1 << 20, resume={resume}
    )
    tokenization.preprocess([Path(sys.argv[1])], options, on_progress=print_progress)
"""


def _children(pid):
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= {int(child)} | _children(int(child))
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_run_leaves_no_shard_and_no_process_and_can_be_resumed(tmp_path, workers):
    path = _jsonl(tmp_path, [{"text": f"document {k}"} for k in range(300)])
    script = tmp_path / "script.py"
    command = [sys.executable, str(script), str(path), str(tmp_path / "out"), workers]
    script.write_text(_RUN.format(stop=True, resume=False, least=500))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        while int(process.stdout.readline()) < 50:
            pass
        children = [os.pidfd_open(child) for child in _children(process.pid)]
        assert len(children) >= int(workers) - 1
        process.send_signal(signal.SIGKILL)
    for child in children:  # readable when the process has ended
        with os.fdopen(child) as ended:
            assert multiprocessing.connection.wait([ended], timeout=30)
    assert [p.name for p in tmp_path.glob("out*")] == ["out.parts"]
    script.write_text(_RUN.format(stop=False, resume=True, least=500))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert len(_documents(tmp_path / "out_text_document")) == 300


def test_giant_line_is_skipped_in_little_memory(tmp_path):
    """Skips a line of 800 MiB, sparse on disk, in an address space of 700 MiB."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "first"}\n')
    os.truncate(path, 800 << 20)
    with path.open("ab") as file:
        file.write(b'\n{"text": "last"}\n')

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))

    script = tmp_path / "script.py"
    script.write_text(_RUN.format(stop=False, resume=False, least=200 << 20))
    command = [sys.executable, str(script), str(path), str(tmp_path / "out"), "1"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, preexec_fn=limit, env=environment)
    assert [bytes(ids[:-1]) for ids in _documents(tmp_path / "out_text_document")] == [b"first", b"last"]
    manifest = json.loads((tmp_path / "out_text_document.manifest.json").read_text())
    assert manifest["bad_lines"] == {"too long": 1}
