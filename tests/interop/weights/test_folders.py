"""Folders that other systems write: dtypes, older layouts, spellings of config.json, and refused settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megalin.checkpoint.tensors import weights
from megalin.errors import CheckpointError, ConfigError, MegalinError
from megalin.interop.weights.exporting import NO_LIMIT, export_hf
from megalin.interop.weights.importing import import_hf
from megalin.train.open_run import open_run
from tests.cases import build
from tests.interop.weights.external import transnormerllm
from tests.interop.weights.models import MODELS, make_tokens, read_exported, read_run, write_run

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the exported folder of a model by name, which is made once; read-only."""
    root = tmp_path_factory.mktemp("exported")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            write_run(root / f"run-{name}", MODELS[name].table | {"tie_embeddings": False})
            export_hf(root / f"run-{name}", root / name, form=MODELS[name].format)
        return root / name

    return folder


@pytest.fixture
def changed(exported: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Change], Path]:
    """Returns a copy of such a folder with changed tensors and config.json."""

    def folder(name: str, change: Change) -> Path:
        tensors, config = read_exported(exported(name))
        change(tensors, config)
        out = tmp_path / "folder"
        out.mkdir()
        safetensors.torch.save_file(tensors, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(config))
        return out

    return folder


def _no_change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Leaves the folder unchanged."""


def _fails(kind: type[MegalinError], folder: Path, run: Path, *parts: str) -> None:
    with pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts)):
        import_hf(folder, run)
    assert not run.exists(), "a refused folder leaves nothing behind"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(dtype: torch.dtype, changed: Any, tmp_path: Path):
    def halve(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}

    folder = changed("llama", halve)
    import_hf(folder, tmp_path / "run")
    tensors, _ = read_exported(folder)
    found = weights(read_run(tmp_path / "run"))["blocks.1.sublayers.1.mixer.up.weight"]
    names = ("gate_proj", "up_proj")
    assert torch.equal(found, torch.stack([tensors[f"model.layers.1.mlp.{name}.weight"].float() for name in names]))


def test_fused_gates_of_older_hgrn2_folders(changed: Any, exported: Any, tmp_path: Path):
    def fuse(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for index in range(config["num_hidden_layers"]):
            gate, up = (tensors.pop(f"model.layers.{index}.mlp.{name}_proj.weight") for name in ("gate", "up"))
            tensors[f"model.layers.{index}.mlp.gate_proj.weight"] = torch.cat([gate, up])

    import_hf(changed("hgrn2", fuse), tmp_path / "older")
    import_hf(exported("hgrn2"), tmp_path / "newer")
    older, newer = (weights(read_run(tmp_path / name)) for name in ("older", "newer"))
    assert all(torch.equal(older[name], newer[name]) for name in newer)


def test_folders_of_links_into_a_cache_are_read(exported: Any, tmp_path: Path):
    (tmp_path / "snapshot").mkdir()
    for file in exported("llama").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    import_hf(tmp_path / "snapshot", tmp_path / "run")


def test_buffers_of_old_llama_folders_are_passed_over(changed: Any, tmp_path: Path):
    def add(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        del config["rope_parameters"]

    import_hf(changed("llama", add), tmp_path / "run")
    attention = read_run(tmp_path / "run").config.layers[0].sublayers[0].model_dump()
    assert attention["rope_base"] == 500.0


def test_a_tied_head_that_is_stored_must_be_the_embedding(changed: Any, tmp_path: Path):
    def tie(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = changed("llama", tie)
    import_hf(folder, tmp_path / "run")
    assert read_run(tmp_path / "run").head is None
    tensors, _ = read_exported(folder)
    tensors["lm_head.weight"][7, 0] += 1
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    _fails(CheckpointError, folder, tmp_path / "other", "lm_head.weight: differs from", "tie_word_embeddings to false")


@pytest.mark.parametrize(
    ("name", "positions", "length"),
    [("llama", 8192, 8192), ("llama", 512, 512), ("llama", None, 2048), ("hgrn2", 8192, 2048), ("hgrn2", 512, 512)],
)
def test_softmax_models_keep_all_their_positions(
    name: str, positions: int | None, length: int, changed: Any, tmp_path: Path
):
    def change(_: dict[str, Tensor], config: dict[str, Any]) -> None:
        config.pop("max_position_embeddings")
        config |= {} if positions is None else {"max_position_embeddings": positions}

    import_hf(changed(name, change), tmp_path / "run")
    config, _ = open_run(tmp_path / "run")
    assert config.data.sequence_length == length
    export_hf(tmp_path / "run", tmp_path / "out")
    _, settings = read_exported(tmp_path / "out")
    assert settings["max_position_embeddings"] == (length if name == "llama" else NO_LIMIT)


def test_a_released_transnormerllm_folder(changed: Any, tmp_path: Path):
    """A folder in bf16 with the tied head stored too, and with the config.json keys of the released class."""

    def release(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        config |= {"auto_map": {"AutoConfig": "configuration_transnormer.TransnormerConfig"}, "add_bos_token": False}
        config |= {"use_cache": True, "torch_dtype": "bfloat16", "linear_use_lrpe_list": [1, 0, 0]}
        for key in ("tie_word_embeddings", "max_position_embeddings", "bias"):
            del config[key]

    folder = changed("transnormerllm", release)
    import_hf(folder, tmp_path / "run")
    model = read_run(tmp_path / "run")
    assert model.head is None
    assert model.config.embedding_scale == 32**0.5
    assert [block.sublayers[0].model_dump()["lrpe"] for _, block in model.config.blocks()] == ["cosine", None, None]
    tensors, config = read_exported(folder)
    wide = build(model.config, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    tokens = make_tokens()
    with torch.no_grad():
        ours = wide(tokens[None]).logits[0, :, : model.config.vocab_size]
    wide_tensors = {name: tensor.double() for name, tensor in tensors.items()}
    theirs = transnormerllm(wide_tensors, config | {"tie_word_embeddings": True}, tokens)
    assert (ours - theirs).norm() / theirs.norm() < 1e-12


def test_a_glu_as_wide_as_the_model(changed: Any, tmp_path: Path):
    def narrow(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["glu_dim"] = -1
        for index in range(3):
            for name, keep in (("l1", slice(32)), ("l2", slice(32)), ("l3", (slice(None), slice(32)))):
                key = f"model.layers.{index}.channel_mixer.{name}.weight"
                tensors[key] = tensors[key][keep].clone()

    import_hf(changed("transnormerllm", narrow), tmp_path / "run")
    assert read_run(tmp_path / "run").config.layers[0].sublayers[1].model_dump()["intermediate_size"] == 32


def test_weightless_norms_become_weights_of_ones(tmp_path: Path):
    table = MODELS["hgrn2"].table
    text = json.dumps(table).replace('"rmsnorm"', '"srmsnorm"')
    model = write_run(tmp_path / "run", json.loads(text))
    export_hf(tmp_path / "run", tmp_path / "out")
    tensors, _ = read_exported(tmp_path / "out")
    assert torch.equal(tensors["model.layers.2.attn.g_norm.weight"], torch.ones(32))
    import_hf(tmp_path / "out", tmp_path / "back")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before, after = model(tokens).logits, read_run(tmp_path / "back")(tokens).logits
    assert torch.equal(before, after)


def test_a_weightless_norm_behind_the_scan(changed: Any, tmp_path: Path):
    def strip(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["elementwise_affine"] = False
        for index in range(3):
            del tensors[f"model.layers.{index}.attn.g_norm.weight"]

    import_hf(changed("hgrn2", strip), tmp_path / "run")
    assert read_run(tmp_path / "run").config.layers[0].sublayers[0].model_dump()["output_norm"] == "srmsnorm"


def test_the_two_window_conventions(exported: Any):
    _, fla = read_exported(exported("rodimus_plus-fla"))
    _, codefuse = read_exported(exported("rodimus_plus-codefuse"))
    assert fla["ska_attn"]["window_size"] == 7  # keys, including the token's own
    assert codefuse["attn_cfg"]["window_size"] == 12  # twice the keys before the token


def _set(key: str, value: Any) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        table = config
        *path, last = key.split(".")
        for part in path:
            table = table[part]
        table[last] = value

    return change


REFUSED = [
    ("llama", "architectures", ["GPT2LMHeadModel"], ["'GPT2LMHeadModel'", "not supported; supported:", "fla", "Llama"]),
    ("mamba", "use_bias", True, ["use_bias = True; supported: False"]),
    ("mamba", "intermediate_size", 96, ["intermediate_size = 96: supported: twice hidden_size = 32"]),
    ("mamba", "time_step_rank", "half", ["time_step_rank = 'half': must be a positive integer"]),
    ("mamba2", "time_step_limit", [0.001, 0.1], ["time_step_limit = [0.001, 0.1]: supported: [0.0, Infinity]"]),
    ("mamba2", "num_heads", 4, ["num_heads = 4: times head_dim = 8 must be twice hidden_size = 32"]),
    ("mamba2", "use_conv_bias", False, ["use_conv_bias = False; supported: True"]),
    ("llama", "hidden_act", "gelu", ["hidden_act = 'gelu'; supported: 'silu'"]),
    ("llama", "attention_bias", 1, ["attention_bias = 1: must be true or false"]),
    ("llama", "rope_scaling", {"type": "linear"}, ["rope_scaling: factor = None: must be a positive number"]),
    (
        "llama",
        "rope_scaling",
        {"type": "linear", "factor": 2},
        ["rope_scaling = {'type", "but rope_parameters differs"],
    ),
    (
        "qwen3",
        "layer_types",
        ["full_attention"],
        ["layer_types = ['full", "must be a list of 3 times full_attention or"],
    ),
    ("qwen3", "layer_types", ["full_attention", "chunked", "mamba"], ["must be a list of 3 times full_attention or"]),
    ("qwen3", "layer_types", ["sliding_attention"] * 3, ["sliding_attention needs use_sliding_window = true and a"]),
    ("llama", "rope_parameters.rope_type", "yarn", ["rope_type = 'yarn'", "supported: 'default'"]),
    ("llama", "rope_theta", 7.0, ["rope_theta = 7.0: but rope_parameters.rope_theta = 500.0"]),
    ("llama", "rope_parameters", 3, ["rope_parameters = 3: must be an object"]),
    ("llama", "num_hidden_layers", 10**6, ["1000000 layers, but the folder has only 30 tensors"]),
    ("llama", "vocab_size", "many", ["vocab_size = 'many': must be a positive integer"]),
    ("llama", "rms_norm_eps", 0, ["rms_norm_eps = 0: must be a positive number"]),
    (
        "llama",
        "intermediate_size",
        10**13,
        ["intermediate_size = 10000000000000: must be a positive integer of at most 16777216"],
    ),
    ("llama", "rms_norm_eps", 10**300, ["rms_norm_eps = 1000", "must be a positive number of at most 1e+12"]),
    ("llama", "tie_word_embeddings", 1, ["tie_word_embeddings = 1: must be true or false"]),
    ("hgrn2", "use_short_conv", True, ["use_short_conv = True; supported: False"]),
    ("hgrn2", "expand_ratio", 5, ["expand_ratio = 5: it must divide hidden_size = 32"]),
    ("hgrn2", "attn", {"layers": [1]}, ["attn = {'layers': [1]}; supported: None"]),
    ("rodimus-fla", "block_type", "other", ["block_type = 'other': supported: 'rodimus' or 'rodimus_plus'"]),
    ("rodimus-fla", "k_norm_eps", 1e-6, ["k_norm_eps = 1e-06; supported: None or 1e-12"]),
    ("rodimus_plus-fla", "ska_attn.window_size", None, ["window_size = None: attention to all earlier tokens"]),
    ("rodimus_plus-fla", "ska_attn.qk_norm", True, ["qk_norm = True; supported: False"]),
    ("rodimus-codefuse", "mixer_cfg.expand_ratio", 3, ["mixer_cfg", "expand_ratio = 3; supported: 2"]),
    ("rodimus_plus-codefuse", "attn_cfg.window_size", -1, ["attn_cfg: window_size = -1: must be a positive integer"]),
    ("rodimus_plus-codefuse", "attn_cfg.num_heads_v", 2, ["num_heads_v = 2; supported: 4"]),
    ("transnormerllm", "norm_type", "layernorm", ["norm_type = 'layernorm'; supported: 'simplermsnorm'"]),
    (
        "transnormerllm",
        "linear_use_lrpe_list",
        [1],
        ["linear_use_lrpe_list = [1]: must be a list of decoder_layers = 3"],
    ),
    ("transnormerllm", "hidden_dim", 64, ["hidden_dim = 64: supported: decoder_embed_dim = 32"]),
]


@pytest.mark.parametrize(
    ("name", "key", "value", "parts"),
    REFUSED,
    ids=[f"{row[0]}-{row[1]}-{number}" for number, row in enumerate(REFUSED)],
)
def test_settings_that_our_mixers_do_not_compute(
    name: str, key: str, value: Any, parts: list[str], changed: Any, tmp_path: Path
):
    _fails(CheckpointError, changed(name, _set(key, value)), tmp_path / "run", "config.json", *parts)


def test_sizes_that_no_model_can_have(changed: Any, tmp_path: Path):
    folder = changed("llama", _set("num_key_value_heads", 3))
    _fails(ConfigError, folder, tmp_path / "run", "num_key_value_heads = 3 does not divide")


def test_num_heads_of_hgrn2_without_a_ratio(changed: Any, tmp_path: Path):
    def heads(count: int) -> Change:
        def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
            config |= {"expand_ratio": None, "num_heads": count}

        return change

    folder = changed("hgrn2", heads(4))
    import_hf(folder, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_heads": 5}))
    _fails(CheckpointError, folder, tmp_path / "other", "num_heads = 5: it must divide hidden_size = 32")


def test_every_tensor_that_does_not_fit_is_named_at_once(changed: Any, tmp_path: Path):
    def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors["model.layers.2.self_attn.o_proj.weight"]
        tensors["model.layers.1.mlp.extra.weight"] = torch.ones(3)
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].double()

    folder = changed("llama", spoil)
    with pytest.raises(CheckpointError) as failure:
        import_hf(folder, tmp_path / "run")
    for line in (
        "model.layers.2.self_attn.o_proj.weight: missing; expected shape [32, 32]",
        "model.layers.1.mlp.extra.weight: unexpected tensor of shape [3]",
        "model.norm.weight: shape [31], expected [32]",
        "lm_head.weight: dtype F64 is not supported; store it as F32 or BF16 or F16",
    ):
        assert line in str(failure.value)
    assert not (tmp_path / "run").exists()
