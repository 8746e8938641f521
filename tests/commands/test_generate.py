"""`megalin generate` on a trained run: one prompt, files of them, standard input, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, processors

import megalin
from megalin.__main__ import main
from megalin.errors import ConfigError
from megalin.generation import cast_weights, load_for_generation
from megalin.generation.load import GenerationRun
from megalin.generation.prompts import Prompt, check_prompts
from tests.cases import CASES, GLU, attention, build, model
from tests.model_runs import CPU, checkpoint_tensors
from tests.tokenizer_runs import BEGIN_ID, characters, with_tokenizer

LINES = [{"prompt": "!#%", "id": 7}, {"prompt": "a"}, {"prompt": "longer than the others", "completion": "old"}]


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    return path


def test_generate_continues_the_prompt(trained, capsys):
    command = ["generate", trained, "--prompt", "!#%", "--max-tokens", 8]
    greedy = output(capsys, *command, "--temperature", 0)
    assert greedy.startswith("!#%")
    assert len(greedy) > 4
    assert output(capsys, *command, "--temperature", 0, "--dtype", "float32") == greedy
    assert output(capsys, *command, "--temperature", 2.0, "--top-k", 1, "--seed", 4) == greedy
    assert output(capsys, *command) == output(capsys, *command, "--temperature", 0.8, "--repetition-penalty", 1)


def test_prompts_of_a_command_are_continued_in_order(trained, capsys):
    options = ["--max-tokens", 4, "--temperature", 0]
    each = [output(capsys, "generate", trained, "--prompt", text, *options) for text in ("!#%", "bc")]
    assert output(capsys, "generate", trained, "--prompt", "!#%", "--prompt", "bc", *options) == "".join(each)


def test_text_on_a_terminal_has_no_control_characters(trained, capsys, monkeypatch):
    command = ["generate", str(trained), "--prompt", "\x1b[2Jä", "--max-tokens", "1"]
    assert output(capsys, *command).startswith("\x1b[2Jä")  # a file takes it as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("\\x1b[2Jä")


def test_generate_loads_the_trained_weights(trained):
    model, tokenizer = load_for_generation(trained, CPU)
    saved = checkpoint_tensors(trained)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    assert tokenizer.vocab_size == 257


def test_special_tokens_begin_prompts_on_request(trained, tmp_path, capsys):
    names = {**{number: f"w{number}" for number in range(257)}, 97: "a", 32: "<s>", 256: "</s>"}
    library = Tokenizer(models.WordLevel({name: number for number, name in names.items()}, unk_token="a"))
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 32)])
    run = with_tokenizer(trained, tmp_path / "run", library)
    model = megalin.load(run)
    assert model.tokenizer.eod_id == 256
    greedy = {"temperature": 0, "max_tokens": 6}
    found = (model.generate(ids, **greedy) for ids in ([32, 97], [97]))
    with_bos, without = (model.tokenizer.decode([97, *ids]).removeprefix("a") for ids in found)
    assert with_bos != without
    assert model.generate("a", special_tokens=True, **greedy) == with_bos
    assert model.generate("a", **greedy) == without
    command = ["generate", run, "--prompt", "a", "--max-tokens", 6, "--temperature", 0]
    assert output(capsys, *command, "--special-tokens") == f"a{with_bos}\n"
    assert output(capsys, *command) == f"a{without}\n"


@pytest.mark.parametrize("begin", [False, True])
def test_completions_keep_the_space_between_them_and_their_prompts(trained, tmp_path, capsys, begin):
    """The decoder drops the first space of a text, so a completion that was decoded alone has lost it."""
    run = with_tokenizer(trained, tmp_path / "run", characters(begin=begin))
    model, options = megalin.load(run), ["--max-tokens", 8, "--temperature", 0]
    special = ["--special-tokens"] if begin else []
    ids = {text: model.tokenizer.encode(text) for text in ("abc", "The end of", "x")}
    first = [BEGIN_ID] if begin else []
    texts = {
        text: model.tokenizer.decode([*own, *model.generate([*first, *own], max_tokens=8, temperature=0)])
        for text, own in ids.items()
    }
    assert any(texts[text].removeprefix(text).startswith(" ") for text in ids)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ids))
    written = output(capsys, "generate", run, "--prompts", lines, *options, *special).splitlines()
    for line in map(json.loads, written):
        assert line["prompt"] + line["completion"] == texts[line["prompt"]]
    for text, whole in texts.items():
        assert text + model.generate(text, max_tokens=8, temperature=0, special_tokens=begin) == whole
        assert output(capsys, "generate", run, "--prompt", text, *options, *special) == whole + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt has no tokens; give some text"),
        (["--prompt", "a", "--prompt", "\udcff"], "prompt 2 is not UTF-8; convert it to UTF-8"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0: use at least 1"),
        (["--prompt", "a", "--batch-size", "0"], "--batch-size 0: use at least 1"),
        (["--prompt", "a", "--repetition-penalty", "0"], "repetition penalty = 0.0 is not in (0, inf); use 1 for none"),
        (["--prompt", "a", "--temperature", "-1"], "temperature = -1.0 is not in [0, inf); use 0 for the likeliest"),
        (["--prompt", "a", "--temperature", "nan"], "temperature = nan is not in [0, inf)"),
        (["--prompt", "a", "--top-k", "0"], "top-k = 0 keeps no token; use at least 1"),
        (["--prompt", "a", "--top-p", "1.5"], "top-p = 1.5 is not in (0, 1]; use 1 to keep every token"),
        (["--prompt", "a", "--seed", str(2**70)], "is not in [0, 2^63); use a small number"),
        (["parallel.cp=2", "--prompt", "a"], "override 'parallel.cp=2': generation reads only parallel.tp, the ranks"),
        (
            ["parallel.tp=2", "--prompt", "a"],
            "parallel.tp = 2 does not divide the number of ranks, 1; start a multiple",
        ),
        (["parallel.tp=x", "--prompt", "a"], "tp = 'x': input should be a valid integer"),
    ],
)
def test_generate_refuses(fails, trained, arguments, message):
    assert message in fails(3 if "UTF-8" in message else 2, "generate", trained, *arguments)


def test_generate_without_a_tokenizer_is_refused(fails, trained, tmp_path):
    text = (trained / "config.toml").read_text().replace('tokenizer = "bytes"', "")
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "checkpoints").symlink_to(trained / "checkpoints")
    message = fails(2, "generate", tmp_path, "--prompt", "a")
    assert "data.tokenizer is not set, so text cannot be encoded; set it" in message


def test_a_file_of_prompts_becomes_a_file_of_completions(trained, capsys, file, tmp_path):
    def results(batch_size):
        path = tmp_path / f"{batch_size}.jsonl"
        options = ["--prompts", file, "--output", path, "--batch-size", batch_size]
        assert output(capsys, "generate", trained, *options, "--max-tokens", 8, "--temperature", 1) == ""
        return [json.loads(line) for line in path.read_text().splitlines()]

    found = results(2)
    assert found == results(16) == results(1)
    assert [line["prompt"] for line in found] == [line["prompt"] for line in LINES]
    assert found[0]["id"] == 7
    assert all(line["tokens"] == 8 or line["stopped"] for line in found)
    alone = output(capsys, "generate", trained, "--prompt", "!#%", "--max-tokens", 8, "--temperature", 1)
    assert alone == "!#%" + found[0]["completion"] + "\n"


def test_a_file_is_written_below_a_progress_bar_on_a_terminal(trained, capsys, file, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    options = ["--prompts", file, "--output", tmp_path / "out.jsonl", "--batch-size", 2, "--max-tokens", 5]
    assert main([str(argument) for argument in ("generate", trained, *options)]) == 0
    shown = capsys.readouterr().err
    assert "tokens of a batch" in shown
    assert "10/10" in shown  # two batches


def test_prompts_and_text_come_from_standard_input(trained, capsys, file, monkeypatch):
    options = ["--max-tokens", 4, "--temperature", 0]
    expected = output(capsys, "generate", trained, "--prompts", file, *options)
    assert len(expected.splitlines()) == 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert output(capsys, "generate", trained, "--prompts", "-", *options) == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("!#%"))
    text = output(capsys, "generate", trained, *options)
    assert text == output(capsys, "generate", trained, "--prompt", "!#%", *options)


def test_every_checkpoint_completes_the_prompts(trained, capsys, file, tmp_path):
    options = ["--max-tokens", 4, "--temperature", 0]
    command = ["generate", trained, "--prompts", file, *options]
    assert output(capsys, *command, "--all-steps", "--output", tmp_path / "all.jsonl") == ""
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    by_step = {step: [line for line in lines if line["step"] == step] for step in (2, 4, 6, 8, 10, 12)}
    assert [line for of_step in by_step.values() for line in of_step] == lines
    for step, of_step in by_step.items():
        alone = [json.loads(line) for line in output(capsys, *command, "--step", step).splitlines()]
        assert of_step == [line | {"step": step} for line in alone]
    assert by_step[2] != [line | {"step": 2} for line in by_step[12]]
    text = output(capsys, "generate", trained, "--prompt", "!#%", "--all-steps", *options)
    parts = [f"step {step}\n!#%{of_step[0]['completion']}\n" for step, of_step in by_step.items()]
    assert text == "".join(parts)


@pytest.mark.parametrize("arguments", [["generate", "run"], ["export", "hf", "run", "out"]])
def test_one_step_and_all_steps_exclude_each_other(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*arguments, "--step", "2", "--all-steps"])
    assert exit.value.code == 2
    assert "argument --all-steps: not allowed with argument --step" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["generate"], ["export", "hf"]])
def test_all_steps_of_a_run_without_checkpoints_are_refused(arguments, fails, trained, tmp_path):
    (tmp_path / "config.toml").write_text((trained / "config.toml").read_text())
    rest = ["--prompt", "a"] if arguments == ["generate"] else [tmp_path / "out"]
    message = fails(4, *arguments, tmp_path, *rest, "--all-steps")
    assert f"{tmp_path}: the run has no checkpoint yet; train it first (megalin train)" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ('{"prompt": "a"}\nno json\n', 3, "prompts.jsonl, line 2: not JSON"),
        ('{"text": "a"}\n', 3, "line 1: expected an object with a string \"prompt\"; found {'text': 'a'}"),
        ('\n{"prompt": 3}\n', 3, 'line 2: expected an object with a string "prompt"'),
        ('{"prompt": "\\ud800"}\n', 3, 'line 1: expected an object with a string "prompt"'),
        ('{"prompt": "a", "id": ' + "[" * 300 + "]" * 300 + "}", 3, "line 1: not JSON (nested more than 100 deep)"),
        ("[1]\n" * 20, 3, "and 12 more"),
        ("\n", 3, 'prompts.jsonl: no prompts; write one object with a string "prompt" a line'),
        ('{"prompt": "a"}\n{"prompt": ""}\n', 2, "prompts.jsonl, line 2 has no tokens; give some text"),
    ],
)
def test_files_that_hold_no_prompts_are_refused(fails, trained, file, text, code, message, monkeypatch):
    file.write_text(text)
    monkeypatch.setattr(GenerationRun, "load_model", lambda *_, **__: pytest.fail("the weights were loaded"))
    assert message in fails(code, "generate", trained, "--prompts", file)


def test_missing_files_and_outputs_that_exist_are_refused(fails, trained, file, tmp_path, monkeypatch):
    message = fails(3, "generate", trained, "--prompts", tmp_path / "none")
    assert "no such file; give a JSON Lines file to --prompts" in message
    message = fails(2, "generate", trained, "--prompts", file, "--output", file)
    assert f"--output {file}: exists already; remove it or give another name" in message
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert "no prompt; give --prompt TEXT, --prompts FILE, or text on standard input" in fails(2, "generate", trained)
    monkeypatch.setattr(sys, "stdin", None)
    assert "no prompt; give --prompt TEXT" in fails(2, "generate", trained)
    for errors in ("strict", "surrogateescape"):  # of Python's standard input in a locale with and without UTF-8
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a \xff"), "utf-8", errors))
        assert "the text on standard input is not UTF-8" in fails(3, "generate", trained)


def test_fields_of_a_prompt_are_repeated_as_they_are(trained, file, capsys):
    fields = '"prompt": "a", "half": "\\ud800", "score": NaN, "large": 1' + "0" * 30
    file.write_text("{" + fields + "}\n")
    line = output(capsys, "generate", trained, "--prompts", file, "--max-tokens", 1)
    assert line.startswith("{" + fields + ', "completion": ')


def test_prompts_beyond_the_positions_of_softmax_attention_are_refused():
    prompts = [Prompt("", f"line {length}", {}) for length in (8, 9)]
    check_prompts(prompts, [[1] * 8, [1] * 9], max_tokens=4, positions=None)
    with pytest.raises(ConfigError, match=r"^line 9 has 9 tokens; with 4 new ones that is more than the 12 positions"):
        check_prompts(prompts, [[1] * 8, [1] * 9], max_tokens=4, positions=12)


def test_only_softmax_attention_and_learned_positions_limit_positions():
    config = SimpleNamespace(data=SimpleNamespace(sequence_length=64))
    learned = model({"sublayers": [attention("transnormer", absolute_positions="learned", max_positions=90), GLU]})
    assert GenerationRun(config, learned, None, None).positions == 90
    limits = {case.name: GenerationRun(config, case.model, None, None).positions for case in CASES}
    assert {name for name, limit in limits.items() if limit == 64} == {"softmax", "softmax-grouped"}
    assert set(limits.values()) == {64, None}


def test_weights_are_cast_but_for_those_that_compute_in_full_precision():
    (case,) = (case for case in CASES if case.name == "transnormer-cosine")
    built = build(case.model, dtype=torch.float32)
    cast_weights(built, torch.bfloat16)
    precise = {id(p) for module in built.full_precision_modules() for p in module.parameters()}
    assert precise
    for parameter in built.parameters():
        assert parameter.dtype == (torch.float32 if id(parameter) in precise else torch.bfloat16)
    assert all(buffer.dtype == torch.float32 for buffer in built.buffers())
