"""The commands export and import, and uses of an imported run: generation, evaluation, training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalin.__main__ import main
from megalin.checkpoint.load import newest
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import weights
from megalin.data.tokenizers.tokenizer import END_OF_DOCUMENT, BytePairTrainer
from megalin.train.open_run import open_run
from tests.interop.weights.models import MODELS, SOFTMAX, SWIGLU, VOCABULARY, model_table, read_run, write_run
from tests.model_runs import steps_saved, write_config


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A byte-level BPE with fewer ids than the models."""
    trainer = BytePairTrainer(VOCABULARY - 5).train(["the cat and the dog and the bird sat on the mat " * 3])
    trainer.save(tmp_path / "bpe.json")
    return tmp_path / "bpe.json"


def _command(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_export_and_import_carry_the_tokenizer(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "run", MODELS["rodimus-codefuse"].table, tokenizer=str(tokenizer))
    assert _command("export", "hf", tmp_path / "run", tmp_path / "out", "--format", "codefuse") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: RodimusForCausalLM (codefuse)\n"
    config = json.loads((tmp_path / "out/config.json").read_text())
    end = tokenizers.Tokenizer.from_file(str(tokenizer)).token_to_id(END_OF_DOCUMENT)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == end
    about = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert about == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    assert _command("import", "hf", tmp_path / "out", tmp_path / "back") == 0
    output = capsys.readouterr().out
    assert "RodimusForCausalLM (codefuse), " in output
    assert "step 0" in output
    assert "without a tokenizer" not in output
    tokenizer.unlink()  # the imported run has its own
    texts = []
    for run in (tmp_path / "back", tmp_path / "back"):
        assert _command("generate", run, "--prompt", "the cat", "--max-tokens", "8") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the cat")


def test_export_and_import_carry_the_token_that_begins_texts(tokenizer: Path, tmp_path: Path):
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    begin = library.token_to_id("a")
    library.post_processor = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", begin)])
    library.save(str(tokenizer))
    write_run(tmp_path / "run", MODELS["llama"].table, tokenizer=str(tokenizer))
    for source, out, run in (("run", "out", "imported"), ("imported", "again", "imported again")):
        assert _command("export", "hf", tmp_path / source, tmp_path / out) == 0
        assert json.loads((tmp_path / out / "config.json").read_text())["bos_token_id"] == begin
        assert json.loads((tmp_path / out / "tokenizer_config.json").read_text())["bos_token"] == "a"
        assert _command("import", "hf", tmp_path / out, tmp_path / run) == 0
        assert open_run(tmp_path / run)[0].data.special_tokens is True
    text = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/config.toml").write_text(text.replace("[data]", "[data]\nspecial_tokens = false"))
    assert _command("export", "hf", tmp_path / "run", tmp_path / "without") == 0
    assert json.loads((tmp_path / "without/config.json").read_text())["bos_token_id"] is None
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "without/tokenizer.json"))
    assert exported.encode("ab").ids == library.encode("ab", add_special_tokens=False).ids


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_imported_model_generates_with_the_end_of_sentence_of_its_folder(
    file: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_run(tmp_path / "run", MODELS["llama"].table)
    out = tmp_path / "out"
    assert _command("export", "hf", tmp_path / "run", out) == 0
    (out / "tokenizer.json").write_text(tokenizer.read_text().replace(END_OF_DOCUMENT, "</s>"))
    end = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).token_to_id("</s>")
    given = {"eos_token_id": [end, 3]} if file == "config.json" else {"eos_token": {"content": "</s>"}}
    old = json.loads((out / file).read_text()) if (out / file).exists() else {}
    (out / file).write_text(json.dumps(old | given))
    assert _command("import", "hf", out, tmp_path / "back") == 0
    assert "without a tokenizer" not in capsys.readouterr().out
    assert open_run(tmp_path / "back")[0].data.eod_token == "</s>"
    assert _command("generate", tmp_path / "back", "--prompt", "the cat", "--max-tokens", "4") == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert _command("export", "hf", tmp_path / "back", tmp_path / "again") == 0
    assert json.loads((tmp_path / "again/tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert json.loads((tmp_path / "again/config.json").read_text())["eos_token_id"] == end


@pytest.mark.parametrize("spoiled", ["missing", "no end", "too large"])
def test_a_tokenizer_that_runs_cannot_use_is_left_out(
    spoiled: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    table = MODELS["llama"].table | ({"vocab_size": 260} if spoiled == "too large" else {})
    write_run(tmp_path / "run", table)
    assert _command("export", "hf", tmp_path / "run", tmp_path / "out") == 0
    assert not (tmp_path / "out/generation_config.json").exists()
    if spoiled != "missing":
        text = tokenizer.read_text()
        text = text.replace(END_OF_DOCUMENT, "</s>") if spoiled == "no end" else text
        (tmp_path / "out/tokenizer.json").write_text(text)
    assert _command("import", "hf", tmp_path / "out", tmp_path / "back") == 0
    reasons = {
        "missing": "has no tokenizer.json",
        "no end": "has no token <|endoftext|>",
        "too large": "more than the model's 260",
    }
    assert f"without a tokenizer: {tmp_path / 'out'}" in (output := capsys.readouterr().out)
    assert reasons[spoiled] in output
    config, _ = open_run(tmp_path / "back")
    assert config.data.tokenizer is None


def test_errors_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert _command("import", "hf", tmp_path, tmp_path / "run") == 4
    assert capsys.readouterr().err.startswith("CheckpointError: ")
    assert _command("export", "hf", tmp_path, tmp_path / "out") == 2
    assert "no such config file" in capsys.readouterr().err


def test_training_starts_from_imported_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = model_table(SOFTMAX, SWIGLU, vocab_size=257)
    model = write_run(tmp_path / "run", table)
    assert _command("export", "hf", tmp_path / "run", tmp_path / "out") == 0
    assert _command("import", "hf", tmp_path / "out", tmp_path / "back") == 0
    write_config(tmp_path / "files")
    data = tmp_path / "files/data"
    validation = f"data.validation=['{data / 'validation'}']"
    assert _command("eval", tmp_path / "back", validation, "data.sequence_length=36", "--json") == 0
    before = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    overrides = ["data.tokenizer=bytes", f"data.train=['{data / 'train'}']", validation, "data.sequence_length=36"]
    overrides += ["train.steps=2", "train.global_batch_size=2", "optimizer.lr=1e-12", "optimizer.weight_decay=0.0"]
    initial = f"train.initial_weights={tmp_path / 'back'}"
    assert _command("train", tmp_path / "back/config.toml", *overrides, initial, "--folder", tmp_path / "back") == 2
    assert "train.initial_weights: not set in the checkpoint" in capsys.readouterr().err
    assert _command("train", tmp_path / "back/config.toml", *overrides, initial, "--folder", tmp_path / "new") == 0
    taken = len(weights(model))
    assert f"step-00000000: {taken} tensors taken, 0 tiled, 0 new, 0 left" in capsys.readouterr().out
    assert _command("train", tmp_path / "back/config.toml", *overrides, "--folder", tmp_path / "back") == 0
    assert steps_saved(tmp_path / "back") == [0, 2]
    for name, tensor in weights(read_run(tmp_path / "back")).items():
        torch.testing.assert_close(tensor, weights(model)[name], rtol=0, atol=1e-6)
    for folder in ("back", "new"):
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["evaluation_loss"] == pytest.approx(before, rel=1e-5)


def _write_two_checkpoints(folder: Path) -> dict[str, Tensor]:
    """A run with checkpoints of steps 3 and 5; returns the tensors of the first. The second adds 1 to norm.weight."""
    tensors = dict(weights(write_run(folder, MODELS["llama"].table)))
    state = newest(folder / "checkpoints").state()  # type: ignore[union-attr]
    changed = tensors | {"norm.weight": tensors["norm.weight"] + 1.0}
    save(folder / "checkpoints", step=5, tensors=changed, state=state)
    return tensors


def test_export_reads_the_checkpoint_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tensors, norms = _write_two_checkpoints(tmp_path / "run"), []
    for name, choice in (("first", ["--step", 3]), ("newest", [])):
        assert _command("export", "hf", tmp_path / "run", tmp_path / name, *choice) == 0
        norms.append(load_file(tmp_path / name / "model.safetensors")["model.norm.weight"])
    assert torch.equal(norms[0], tensors["norm.weight"])
    assert torch.equal(norms[1], tensors["norm.weight"] + 1.0)
    capsys.readouterr()
    assert _command("export", "hf", tmp_path / "run", tmp_path / "none", "--step", 7) == 4
    assert "no checkpoint of step 7; nearest is 5" in capsys.readouterr().err


def test_export_of_all_steps_writes_a_folder_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tensors, old = _write_two_checkpoints(tmp_path / "run"), tmp_path / "out/step-5/old"
    old.parent.mkdir(parents=True)
    old.touch()
    command = ("export", "hf", tmp_path / "run", tmp_path / "out", "--all-steps")
    assert _command(*command) == 2
    assert f"{old.parent}: exists and is not an empty folder" in capsys.readouterr().err
    assert not (tmp_path / "out/step-3").exists()  # refused before any is written
    old.unlink()
    assert _command(*command) == 0
    folders = [tmp_path / "out/step-3", tmp_path / "out/step-5"]
    assert capsys.readouterr().out == "".join(f"{folder}: LlamaForCausalLM (transformers)\n" for folder in folders)
    norms = [load_file(folder / "model.safetensors")["model.norm.weight"] for folder in folders]
    assert torch.equal(norms[0], tensors["norm.weight"])
    assert torch.equal(norms[1], tensors["norm.weight"] + 1.0)
