"""Configs of other systems are refused by name, and files of no known format are not guessed."""

import json
import random
from pathlib import Path

import pytest

from megalin.errors import ConfigError
from megalin.interop.configs.reading import import_config

NANOTRON = """
checkpoints: {checkpoint_interval: 10, checkpoints_path: checkpoints, save_initial_state: false}
data_stages:
- data: {dataset: null, num_loading_workers: 1, seed: 42}
  name: Stable Training Stage
  start_training_step: 1
general: {benchmark_csv_path: null, project: debug, run: tiny_llama_%date_%jobid, seed: 42, step: null}
logging: {iteration_step_info_interval: 1, log_level: info}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  model_config: {hidden_size: 16, num_hidden_layers: 2, rms_norm_eps: 1.0e-05, vocab_size: 256}
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler: {learning_rate: 0.0003, lr_decay_style: cosine, lr_warmup_steps: 2, min_decay_lr: 1.0e-05}
  weight_decay: 0.01
  zero_stage: 0
parallelism: {dp: 2, pp: 2, pp_engine: 1f1b, tp: 2, tp_mode: REDUCE_SCATTER}
tokens: {batch_accumulation_per_replica: 1, micro_batch_size: 2, sequence_length: 256, train_steps: 15}
"""
OLMO = """
run_name: OLMo-1B
seed: 6198
model: {d_model: 2048, n_heads: 16, n_layers: 16, mlp_ratio: 8, weight_tying: true, rope: true, vocab_size: 50280}
optimizer: {name: adamw, learning_rate: 4.0e-4, weight_decay: 0.1, betas: [0.9, 0.95]}
scheduler: {name: linear_with_warmup, t_warmup: 2000, alpha_f: 0.1}
tokenizer: {identifier: tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json}
save_folder: runs
save_interval: 10000
max_duration: 739_328
global_train_batch_size: 2048
device_train_microbatch_size: 8
precision: amp_bf16
max_grad_norm: 1.0
eval_interval: 1000
data: {pad_direction: right, num_workers: 0, paths: [part-0.npy]}
"""
LITGPT = """
model_name: tiny-llama-1.1b
model_config: null
out_dir: out/pretrain/tiny-llama
precision: bf16-mixed
initial_checkpoint_dir: null
resume: false
data: TinyLlama
train: {save_interval: 1000, log_interval: 1, global_batch_size: 512, micro_batch_size: 4, lr_warmup_steps: 2000,
  max_tokens: 3000000000000, max_norm: 1.0, min_lr: 4.0e-05}
eval: {interval: 1000, max_iters: 100}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 4e-4, weight_decay: 0.1, betas: [0.9, 0.95]}}
devices: auto
tokenizer_dir: null
logger_name: tensorboard
seed: 42
"""
FLA = {
    "architectures": ["GLAForCausalLM"],
    "model_type": "gla",
    "hidden_size": 1024,
    "num_heads": 4,
    "num_hidden_layers": 24,
    "vocab_size": 32000,
}
TORCHTITAN = '[job]\ndump_folder = "out"\n[model]\nname = "llama3"\n[training]\nsteps = 1000\nlocal_batch_size = 8\n'
OWN = '[model]\npreset = "hgrn2_150m"\n[data]\ntrain = ["shard"]\n[train]\nsteps = 1\n'
TRAINER = {"per_device_train_batch_size": 8, "learning_rate": 1e-4, "bf16": True, "optim": "adamw_torch"}
FOREIGN = {
    "nanotron.yaml": (
        NANOTRON,
        "nanotron's config .* import-config reads Megatron-LM's scripts, commands and YAML, gpt",
    ),
    "olmo.yml": (OLMO, "OLMo's config"),
    "litgpt.YAML": (LITGPT, "litgpt's config"),
    "config.json": (json.dumps(FLA), "Hugging Face's config of a model .*; import its folder .* by `megalin import`"),
    "fla.yaml": (json.dumps(FLA), "Hugging Face's config of a model"),
    "trainer.json": (json.dumps(TRAINER), "Hugging Face's training arguments"),
    "titan.toml": (TORCHTITAN, "torchtitan's config"),
    "own.toml": (OWN, "megalin's own config .*; it needs no import"),
    "other.toml": ("[package]\nname = 'x'\n", "a TOML of no known system"),
    "package.json": ('{"name": "x", "scripts": {}}', "DeepSpeed has 0 of its 2 keys"),
    "empty.json": ("{}", "DeepSpeed has 0 of its 0 keys"),
    "compose.yml": ("services: {web: {image: nginx, ports: ['80:80']}}\nseed: 5\n", "Megatron-LM has 1 of its 3 keys"),
    "log.yaml": ("log_dir: logs\nhandlers: 3\nlevel: info\n", "gpt-neox has 1 of its 3 keys"),
    "run.sh": ("python run_clm.py --model_name_or_path gpt2 --do_train --seed 3\n", "Megatron-LM has 1 of its 3 keys"),
}


@pytest.mark.parametrize("name", list(FOREIGN))
def test_config_of_another_system_is_refused_by_name(name: str, tmp_path: Path):
    text, message = FOREIGN[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        import_config(str(tmp_path / name), tmp_path / "out.toml", variables={})
    assert not (tmp_path / "out.toml").exists()


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_keys_that_no_system_has_are_never_a_config(suffix: str, tmp_path: Path):
    generator = random.Random(0)
    for count in range(1, 12):
        names = ["".join(generator.choices("bcdfghjklmnpqrstvwxz", k=9)) for _ in range(count)]
        known = ["seed", "bf16", "optimizer"][: (count - 1) // 2]  # fewer than half
        (tmp_path / f"x.{suffix}").write_text(json.dumps(dict.fromkeys([*names, *known], 3)))
        with pytest.raises(ConfigError, match="not a config that import-config knows"):
            import_config(str(tmp_path / f"x.{suffix}"), tmp_path / "out.toml", variables={})
    assert not (tmp_path / "out.toml").exists()


def test_deepspeed_json_next_to_a_command_is_named_where_it_is_another_systems(tmp_path: Path):
    (tmp_path / "x.json").write_text('{"name": "x"}')
    command = "pretrain_gpt.py --num-layers 2 --hidden-size 64"
    with pytest.raises(ConfigError, match=r"x\.json: not a config .* DeepSpeed has 0 of its 1 keys"):
        import_config(command, tmp_path / "out.toml", variables={}, deepspeed_config=tmp_path / "x.json")


def test_flags_of_a_fork_among_megatrons_are_kept_as_unknown(tmp_path: Path):
    command = "pretrain_gpt.py --num-layers 2 --hidden-size 64 --my-own-flag 3"
    assert import_config(command, tmp_path / "out.toml", variables={}).num_unknown == 1
