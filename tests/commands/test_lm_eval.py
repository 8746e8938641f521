"""`megalin lm-eval`: the harness' own tasks on a run, against plain forwards of each request alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megalin.__main__ import main
from megalin.commands.arguments.parser import build_parser
from megalin.commands.lm_eval import evaluate_on_ranks
from megalin.errors import ConfigError
from megalin.generation import Sampling, generate, load_for_generation, open_for_generation
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from tests.downloaded_run import PACKAGE, forge, planted
from tests.model_runs import CPU
from tests.ranks import run_ranks
from tests.tokenizer_runs import BEGIN, BEGIN_ID, END_ID, characters, with_tokenizer

if TYPE_CHECKING:  # the harness takes longer to import than torch, and each worker imports every file of tests
    from lm_eval.api.instance import Instance

    from megalin.evaluation.lm_eval_adapter import MegalinModel

QUESTIONS = [
    {"question": "The sky is", "choices": ["blue", "green", "loud"], "answer": 0},
    {"question": "Two and two are", "choices": ["five", "four", "six"], "answer": 1},
    {"question": "Ice is", "choices": ["cold", "hot and dry", "made of stone"], "answer": 0},
]
CHOICES = """
task: own_choices
dataset_path: json
dataset_kwargs: {data_files: {test: "QUESTIONS"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: own_texts
dataset_path: json
dataset_kwargs: {data_files: {test: "QUESTIONS"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}"
metric_list: [{metric: bits_per_byte}]
"""
COMPLETION = """
task: own_completions
dataset_path: json
dataset_kwargs: {data_files: {test: "QUESTIONS"}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with task files of our own; nothing else is read or written elsewhere, and nothing downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("choices", CHOICES), ("rolling", ROLLING), ("completion", COMPLETION)):
        (tmp_path / "tasks").mkdir(exist_ok=True)
        (tmp_path / f"tasks/{name}.yaml").write_text(text.replace("QUESTIONS", str(questions)))
    return tmp_path / "tasks"


def of_folder(tasks: Path) -> list[str]:
    """Options with which the tasks are those of a trusted folder."""
    return ["--include-path", str(tasks), "--trust-task-code", "--no-default-tasks"]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run whose results are the test's own."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text((trained / "config.toml").read_text())
    (tmp_path / "run/checkpoints").symlink_to(trained / "checkpoints")
    return tmp_path / "run"


@pytest.fixture
def model(trained: Path) -> Iterator[MegalinModel]:
    """The run's model in the adapter; requests of up to 36 tokens."""
    from megalin.evaluation.lm_eval_adapter import MegalinModel

    with process_group(CPU):
        yield MegalinModel(open_for_generation(trained), Mesh(ParallelConfig(), CPU), batch_size=2)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, values, number) for number, values in enumerate(arguments)]


@torch.no_grad()
def log_probabilities(run: Path, ids: list[int]) -> torch.Tensor:
    """[T - 1] log-probability of each id but the first, by a plain forward."""
    model, _ = load_for_generation(run, CPU)
    logits = model(torch.tensor([ids])).logits[0, :-1, :257].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_likelihoods_are_those_of_plain_forwards(model, trained):
    eod = model.eot_token_id
    pairs = [
        ("The sky is", " blue"),
        ("The sky is", " loud"),
        ("", "alone"),
        ("ends in spaces  ", "x"),
        ("a" * 90, "b"),
    ]
    found = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        ids = [*(context.encode() or [eod]), *continuation.encode()][-37:]
        tail = len(continuation) + len(context) - len(context.rstrip())
        assert value == pytest.approx(log_probabilities(trained, ids)[-tail:].sum().item(), rel=1e-4)


def test_greedy_continuations_are_recognised(model, trained):
    own, tokenizer = load_for_generation(trained, CPU)
    ids = generate(own, tokenizer.encode("The sky"), max_tokens=5, sampling=Sampling(), num_ids=257)
    requests = [(None, tokenizer.encode("The sky"), ids), (None, tokenizer.encode("The sky"), [*ids[:-1], ids[-1] ^ 1])]
    assert [greedy for _, greedy in model._loglikelihood_tokens(requests)] == [True, False]


@pytest.mark.parametrize("length", [1, 36, 37, 80, 110])
def test_rolling_likelihoods_predict_every_token_once(model, trained, length):
    """With as many earlier tokens as fit: the first window has 36, and the last one ends with the text."""
    text = ("The sky is blue and two and two are four. " * 3)[:length]
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,), ("",)), disable_tqdm=True)
    ids = [model.eot_token_id, *text.encode()]
    expected, predicted = 0.0, 0
    while predicted < length:
        end = min(predicted + 36, length)
        window = ids[max(end - 36, 0) : end + 1]
        expected += log_probabilities(trained, window)[-(end - predicted) :].sum().item()
        predicted = end
    assert found == [pytest.approx(expected, rel=1e-4), 0.0]


def test_completions_end_before_their_stop_texts(model, trained):
    own, tokenizer = load_for_generation(trained, CPU)
    count, contexts = 20, ["The sky is", "Two", "x" * 50]
    options = {"max_tokens": count, "sampling": Sampling(), "num_ids": 257, "stop_id": tokenizer.eod_id}
    # Contexts lose what leaves no room for the completion in 36 tokens.
    whole = [tokenizer.decode(generate(own, tokenizer.encode(text)[-16:], **options)) for text in contexts]
    stop = whole[0][3:5]
    for until in ([], [stop, "zz"]):
        requests = [(context, {"until": until, "max_gen_toks": count}) for context in contexts]
        found = model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        assert found == [text.partition(stop)[0] if until else text for text in whole]
    assert found[0] != whole[0]


PAIRS = [("abc", " de"), ("", "alone"), ("ends in spaces  ", "x"), (f"{BEGIN}abc", " d"), ("a" * 90, "b")]


def test_texts_are_encoded_as_in_the_hf_model(trained, tmp_path):
    """With BOS: before texts, contexts and rolling windows, once where a text begins with its name."""
    from megalin.evaluation.lm_eval_adapter import MegalinModel

    library = characters(begin=True)
    run = with_tokenizer(trained, tmp_path / "run", library)
    own, tokenizer = load_for_generation(run, CPU)

    def ids(text: str, *, special: bool = True) -> list[int]:
        # As the library of Hugging Face models: the name of a special token is that token, and BOS is not added to it.
        return library.encode(text, add_special_tokens=special and not text.startswith(BEGIN)).ids

    with process_group(CPU):
        opened, mesh = open_for_generation(run), Mesh(ParallelConfig(), CPU)
        model = MegalinModel(opened, mesh)
        assert (model.prefix_token_id, model.eot_token_id) == (BEGIN_ID, END_ID)
        found = model.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True)
        for (context, continuation), (value, _) in zip(PAIRS, found, strict=True):
            if context:
                context, continuation = context.rstrip(), context[len(context.rstrip()) :] + continuation
                before = ids(context)
                after = ids(context + continuation)[len(before) :]
            else:
                before, after = [BEGIN_ID], ids(continuation, special=False)
            expected = log_probabilities(run, [*before, *after][-37:])[-len(after) :].sum().item()
            assert value == pytest.approx(expected, rel=1e-4), context
        rolling = model.loglikelihood_rolling(instances("loglikelihood_rolling", ("abcde",)), disable_tqdm=True)
        expected = log_probabilities(run, [BEGIN_ID, *ids("abcde")]).sum().item()
        assert rolling == [pytest.approx(expected, rel=1e-4)]
        requests = [(context, {"until": [], "max_gen_toks": 8}) for context in ("abc", "")]
        completions = model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for (context, _), text in zip(requests, completions, strict=True):
            before = tokenizer.encode(context)
            new = generate(own, [BEGIN_ID, *before], max_tokens=8, sampling=Sampling(), num_ids=257, stop_id=END_ID)
            assert context + text == tokenizer.decode([*before, *new])
        off = MegalinModel(opened, mesh, special_tokens=False)
        assert (off.prefix_token_id, off.tok_encode("ab")) == (END_ID, ids("ab", special=False))
        asked = open_for_generation(with_tokenizer(trained, tmp_path / "other", library, "special_tokens = false"))
        assert MegalinModel(asked, mesh).special_tokens == off.special_tokens
        assert MegalinModel(asked, mesh, special_tokens=True).special_tokens == model.special_tokens


def test_continuation_that_merges_with_its_context_is_scored_by_their_last_id(model, monkeypatch, caplog):
    real = model._run.tokenizer.encode
    monkeypatch.setattr(type(model._run.tokenizer), "encode", lambda _, text: real(text.replace("ab", "c")))
    pairs = [("a", "b"), ("x", "ab"), ("xa", "b")]
    found = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    other = [("", "c"), ("x", "c"), ("x", "c")]
    assert found == model.loglikelihood(instances("loglikelihood", *other), disable_tqdm=True)
    assert "2 of 3 continuations merge with their context into one token" in caplog.text


def test_sampled_completions_follow_their_arguments(model):
    arguments = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 5.0}
    first, again = (
        model.generate_until(instances("generate_until", *[("The sky", arguments)] * 3), disable_tqdm=True)
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 3  # draws are those of the request's place
    greedy = {**arguments, "top_k": 1}
    assert len(set(model.generate_until(instances("generate_until", *[("The sky", greedy)] * 3)))) == 1


def test_command_runs_tasks_of_all_three_kinds(run, tasks, trained, capsys):
    output = tasks.parent / "all.json"
    arguments = ["--tasks", "own_choices,own_texts", "own_comp*", *of_folder(tasks)]
    assert main(["lm-eval", str(run), *arguments, "--json", "--output", str(output)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {task: entry["metrics"] for task, entry in printed["12"].items()}
    right = 0
    for question in QUESTIONS:
        scores = [
            log_probabilities(trained, list(f"{question['question']} {choice}".encode())[-37:])[
                -len(choice) - 1 :
            ].sum()
            for choice in question["choices"]
        ]
        right += int(torch.stack(scores).argmax() == question["answer"])
    assert found["own_choices"]["acc,none"] == pytest.approx(right / 3)
    assert found["own_texts"]["bits_per_byte,none"] > 0
    assert found["own_completions"]["exact_match,none"] == 0
    stored = json.loads((run / "evaluations/step-12.json").read_text())
    assert stored["suites"]["lm-eval"] == printed["12"]
    assert printed["12"]["own_choices"]["settings"] == {
        **{"max_length": 36, "limit": None, "dtype": "float32", "version": "Yaml", "num_fewshot": 0, "questions": 3},
        "special_tokens": False,
    }
    assert len(json.loads(output.read_text())["samples"]["own_choices"]) == 3
    assert (
        main(["lm-eval", str(run), "--tasks", "own_texts", *arguments[3:], "--limit", "2", "--no-special-tokens"]) == 0
    )
    stored = json.loads((run / "evaluations/step-12.json").read_text())
    assert set(stored["suites"]["lm-eval"]) == {*printed["12"], "own_texts[:2]"}  # next to the full result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "own_choice"], "own_choice: no such task among .*; did you mean 'own_choices'"),
        (["--tasks", "zzzz"], "zzzz: no such task among .*; add a folder of task files .* by --include-path"),
        (["--tasks", "own_choices", "--limit", "0"], "--limit 0: use at least 1, or leave it out"),
        (["--tasks", "own_choices", "--max-length", "0"], "--max-length 0: use at least 1"),
        (["--tasks", "own_choices", "--batch-size", "0"], "--batch-size 0: use at least 1"),
        (["--tasks", "own_choices", "--step", "7"], "nearest"),
        (["--tasks", "own_completions", "--max-length", "8"], "max_gen_toks = 8 leaves no room for a context"),
        (
            ["--tasks", "own_completions", "--gen-kwargs", "top_q=1"],
            "generation argument top_q: not supported; did you",
        ),
        (
            ["--tasks", "own_choices", "--max-length", "2"],
            "a continuation has .* tokens: .* it needs 1 to --max-length 2",
        ),
    ],
)
def test_bad_input_is_refused(run, tasks, capsys, arguments, message):
    assert main(["lm-eval", str(run), *arguments, *of_folder(tasks)]) != 0
    assert re.search(message, capsys.readouterr().err)
    assert not (run / "evaluations").exists()


def test_task_files_run_no_code_unless_they_are_trusted(run, tasks, capsys):
    mark = tasks.parent / "ran"
    (tasks / "payload.py").write_text(f"open({str(mark)!r}, 'w').close()\n\ndef keep(data):\n    return data\n")
    (tasks / "choices.yaml").write_text((tasks / "choices.yaml").read_text() + "process_docs: !function payload.keep\n")
    command = ["lm-eval", str(run), "--tasks", "own_choices", "--limit", "1"]
    untrusted = [*command, *(option for option in of_folder(tasks) if option != "--trust-task-code")]
    assert main(untrusted) == 2
    assert "add --trust-task-code" in capsys.readouterr().err
    assert not mark.exists()
    assert main([*command, *of_folder(tasks)]) == 0
    assert mark.exists()
    assert main([*command, "--trust-task-code"]) == 2
    assert "no effect without --include-path" in capsys.readouterr().err


def test_a_run_names_a_mixer_that_is_not_imported(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with planted(tmp_path) as mark:
        command = ["lm-eval", str(forge(trained, tmp_path / "forged")), "--tasks", "own_choices"]
        assert main(command) == 2
        assert f"name it: --mixers {PACKAGE}" in capsys.readouterr().err
        assert not mark.exists()


def _on_ranks(run: Path, tasks: Path, meshes: list[dict[str, int]]) -> list[dict[str, Any]]:
    """For each mesh, the results in the run folder after the command on all ranks; sampled completions."""
    found = []
    names = ["own_choices", "own_texts", "own_completions"]
    arguments = ["lm-eval", str(run), *of_folder(tasks), "--batch-size", "2"]
    arguments += ["--tasks", *names]
    arguments += ["--output", str(tasks.parent / "all.json"), "--gen-kwargs", "do_sample=True,temperature=3.0"]
    for axes in meshes:
        evaluate_on_ranks(build_parser().parse_args(arguments), Mesh(ParallelConfig(**axes), CPU))
        samples = json.loads((tasks.parent / "all.json").read_text())["samples"]
        answers = [[sample["resps"] for sample in samples[name]] for name in names]
        stored = json.loads((run / "evaluations/step-12.json").read_text())["suites"]["lm-eval"]
        found.append({"answers": answers, "results": stored})
    return found


def _flat(value: Any) -> list[float]:
    """The numbers of nested lists of texts, in which lm-eval stores likelihoods and flags."""
    if isinstance(value, list):
        return [number for each in value for number in _flat(each)]
    return [float(str(value) == "True") if str(value) in ("True", "False") else float(value)]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "meshes"), [(2, [{}, {"tp": 2}]), (4, [{}, {"tp": 2}])])
def test_results_do_not_depend_on_the_mesh(run, tasks, world_size, meshes):
    ((expected,),) = run_ranks(1, _on_ranks, run, tasks, [{}])
    for of_rank in run_ranks(world_size, _on_ranks, run, tasks, meshes):
        for found in of_rank:
            assert found["answers"][2] == expected["answers"][2]  # sampled texts
            for kind in (0, 1):
                assert _flat(found["answers"][kind]) == pytest.approx(_flat(expected["answers"][kind]), rel=1e-4)
            assert found["results"].keys() == expected["results"].keys()
            for task, entry in expected["results"].items():
                assert found["results"][task]["metrics"] == pytest.approx(entry["metrics"], rel=1e-4)


@pytest.mark.parametrize("argument", ["parallel.cp=2", "data.seed=1"])
def test_other_keys_are_refused(run, capsys, argument):
    assert main(["lm-eval", str(run), argument, "--tasks", "x"]) != 0
    assert f"override '{argument}': generation reads only parallel.tp" in capsys.readouterr().err


def test_no_task_is_an_error(model):
    from megalin.evaluation.lm_eval_adapter import LmEvalOptions, evaluate_tasks

    with pytest.raises(ConfigError, match="no such task"):
        evaluate_tasks(model, LmEvalOptions(["nothing"], default_tasks=False))
