"""Import of Megatron-LM's flags: its example scripts, its defaults, and flags without a counterpart."""

import tomllib
from importlib import resources

import pytest
import yaml

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.interop.configs.flags import load_yaml, parse_flags, reasons
from megalin.interop.configs.imported import ImportedConfig
from megalin.interop.configs.megatron import add_script, add_yaml
from megalin.optim.schedule import learning_rate
from megalin.train.config import RunConfig
from megalin.train.launch_checks import check_launch

# The flags of the example scripts of Megatron-LM at d98e8a6: GPT-3 175B and LLaMA 3 8B, the latter without fp8.
GPT3 = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536
--step-batch-size-schedule "0:16 2.4B:320 4.8B:624" --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9
--adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
--lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
--data-path corpus_text_document --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --log-interval 100
--save-interval 10000 --eval-interval 1000 --save ck --load ck --eval-iters 10 --tensorboard-dir tb --vocab-size 50257
"""
LLAMA3 = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
--train-samples 1953125000 --lr-decay-samples 1953125000 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
--manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 --tensor-model-parallel-size 2
--context-parallel-size 1 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--data-path 30 web_text_document 70 books_text_document --tokenizer-type HuggingFaceTokenizer
--tokenizer-model tok/tokenizer.json --data-cache-path cache --split '99,1,0' --no-create-attention-mask-in-dataloader
--no-mmap-bin-files --num-workers 1 --vocab-size 128256 --log-interval 1 --eval-iters 32 --eval-interval 100
--save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save ck --load ck --tensorboard-dir tb
"""
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
SMALL = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 8
--train-iters 100 --lr 1e-3 --data-path corpus --vocab-size 512 --swiglu --position-embedding-type rope
--disable-bias-linear --hidden-dropout 0 --attention-dropout 0
"""


def _imported(flags, **variables):
    imported = ImportedConfig("flags")
    add_script(flags.replace("\n", " "), variables, imported)
    imported.check()
    return imported


def _config(flags):
    imported = _imported(flags)
    assert imported.complete, imported.report()
    return parse(RunConfig, imported.values, "flags")


def _notes(imported, verdict):
    return {note.key: note.text for note in imported.notes if note.verdict == verdict}


def test_llama_script_is_the_same_run():
    config = _config(LLAMA3)
    (block,) = config.model.layers
    attention, glu = block.sublayers
    assert (block.repeat, config.model.hidden_size, config.model.vocab_size) == (32, 4096, 128256)
    assert (attention.num_heads, attention.key_value_heads, attention.rope_base) == (32, 8, 1e6)
    assert (glu.intermediate_size, glu.activation, glu.bias) == (14336, "silu", False)
    assert {config.model.norm, attention.norm, glu.norm} == {"rmsnorm"}
    assert {config.model.norm_eps, attention.norm_eps, glu.norm_eps} == {1e-5}
    assert (config.model.tie_embeddings, config.model.init_std) == (False, 0.0134)
    assert config.model.output_std == pytest.approx(0.0134 / 64**0.5)  # Megatron-LM divides by the root of 2 x 32
    assert (config.parallel.tp, config.parallel.sequence_parallel, config.parallel.zero) == (2, True, 1)
    assert (config.train.steps, config.train.seed, config.train.dtype) == (1953125000 // 128, 1234, "bfloat16")
    assert (config.schedule.warmup_steps, config.schedule.min_lr_ratio) == (3906252 // 128, 1e-5 / 1.5e-4)
    assert (config.train.evaluate_every_steps, config.train.evaluate_batches) == (100, 32)
    assert (config.checkpoint.every_steps, config.train.log_every_steps) == (1000, 1)
    assert [(source.name, source.paths, source.weight) for source in config.data.sources] == [
        ("web_text_document", ["web_text_document"], 30),
        ("books_text_document", ["books_text_document"], 70),
    ]
    assert (config.data.order, config.data.cache, config.data.split) == ("megatron", "cache", [99, 1, 0])
    assert (config.data.isolate_documents, config.data.tokenizer) == (False, "tok/tokenizer.json")


def test_evaluations_of_a_run_without_a_validation_split_are_left_out():
    imported = _imported(SMALL + " --eval-interval 100 --eval-iters 10 --split 100,0,0")
    config = parse(RunConfig, imported.values, "flags")
    assert (config.train.evaluate_every_steps, config.train.evaluate_batches) == (None, None)
    assert {"--eval-interval", "--eval-iters"} <= _notes(imported, "no effect").keys()
    check_launch(config, 1)


def test_gpt3_script_loads_and_reports_each_difference():
    imported = _imported(GPT3)
    config = parse(RunConfig, imported.values, "flags")
    assert (config.model.num_layers, config.parallel.tp, config.parallel.pp, config.parallel.zero) == (96, 8, 16, 0)
    assert (config.model.hidden_dropout, config.model.embedding_dropout) == (0.1, 0.1)  # the default
    attention, mlp = config.model.layers[0].sublayers
    assert (attention.qkv_bias, attention.output_bias) == (True, True)
    assert (mlp.type, mlp.intermediate_size, mlp.activation, mlp.bias) == ("ffn", 4 * 12288, "gelu_tanh", True)
    assert set(_notes(imported, "differs")) == {
        "--position-embedding-type learned_absolute",
        "--attention-dropout 0.1 (its default)",
        "--initial-loss-scale (default) 4.29497e+09",
        "--hysteresis (default)",
        "--lr-decay-iters",
    }
    (batch,) = _notes(imported, "not available")
    assert batch == "--step-batch-size-schedule 0:16 2.4B:320 4.8B:624"


@pytest.mark.parametrize("flags", [GPT3, LLAMA3], ids=["gpt3", "llama3"])
def test_no_flag_is_dropped_silently(flags):
    imported = _imported(flags)
    reported = " ".join([*(source for _, _, source in imported.mapped), *(note.key for note in imported.notes)])
    silent = set(parse_flags(flags.split())) - {word.strip(",()") for word in reported.split()}
    # Reported only if their value is not the one that megalin always uses.
    assert silent <= {"--attention-dropout", "--kv-channels", "--rotary-percent"}


def test_unknown_flag_is_reported_with_the_nearest_one():
    notes = _notes(_imported(SMALL + "--tensor-model-paralel-size 2 --my-own-thing 7"), "unknown")
    assert notes["--tensor-model-paralel-size 2"].endswith("did you mean --tensor-model-parallel-size?")
    assert "--my-own-thing 7" in notes


@pytest.mark.parametrize(
    "flags",
    [
        "--reset-attention-mask --dataloader-inter-document-masking",
        "--recompute-granularity full --recompute-activations",
        "--checkpoint-activations --recompute-activations",
    ],
)
def test_flags_for_the_same_thing_are_all_known(flags):
    assert _notes(_imported(SMALL + flags), "unknown") == {}


def test_tokens_are_named_as_where_the_steps_come_from():
    imported = _imported(SMALL.replace("--train-iters 100", "--train-tokens 25600"))
    assert ("train.steps", 100, "--train-tokens") in imported.mapped


def test_defaults_are_those_of_megatron():
    config = _config(SMALL)
    assert (config.optimizer.betas, config.optimizer.eps) == ([0.9, 0.999], 1e-8)
    assert (config.optimizer.weight_decay, config.optimizer.max_grad_norm) == (0.01, 1.0)
    assert (config.train.dtype, config.train.seed, config.parallel.zero) == ("float32", 1234, 0)
    assert config.data.split == [969, 30, 1]
    assert config.model.layers[0].sublayers[1].intermediate_size == 128  # 4 x 64 x 2/3, a multiple of 64
    assert config.model.tie_embeddings
    assert (config.model.norm, config.model.norm_eps) == ("layernorm", 1e-5)


def _megatron_rate(done, *, style, peak, start, least, warmup, decay):
    """Learning rate of Megatron-LM's OptimizerParamScheduler after `done` steps."""
    if warmup > 0 and done <= warmup:
        return start + (peak - start) * done / warmup
    if done > decay:
        return least
    if style == "inverse-square-root":
        return max(least, peak * max(warmup, 1) ** 0.5 / max(done, 1) ** 0.5)
    return peak - (peak - least) * (done - warmup) / (decay - warmup)


@pytest.mark.parametrize(("style", "warmup"), [("linear", 10), ("inverse-square-root", 10), ("inverse-square-root", 0)])
@pytest.mark.parametrize(("iterations", "decay"), [(100, 100), (60, 100)])
def test_decay_is_the_same_rate(style, warmup, iterations, decay):
    flags = SMALL.replace("--train-iters 100", f"--train-iters {iterations} --lr-decay-iters {decay}")
    flags += f"--lr-decay-style {style} --min-lr 2e-4 --lr-warmup-init 1e-5"
    config = _config(flags + (f" --lr-warmup-iters {warmup}" if warmup else ""))
    assert (config.train.stop_after_steps or config.train.steps) == iterations
    for step in (0, 5, 9, 10, 50, iterations - 1):
        rate = learning_rate(config.optimizer, config.schedule, step, config.train.steps)
        values = {"peak": 1e-3, "start": 1e-5, "least": 2e-4, "warmup": warmup, "decay": decay}
        assert rate == pytest.approx(_megatron_rate(step + 1, style=style, **values), rel=1e-12)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--bf16", "train.dtype", "bfloat16"),
        ("--recompute-granularity full --recompute-method uniform", "train.recompute", True),
        ("--context-parallel-size 4", "parallel.cp", 4),
        ("--use-torch-fsdp2", "parallel.zero", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "parallel.zero", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel.zero", 2),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 7 --lr-wsd-decay-style linear", "schedule.decay_steps", 7),
        ("--lr-decay-style constant --min-lr 1e-5", "schedule.type", "constant"),
        ("--clip-grad 0", "optimizer.max_grad_norm", None),
        ("--exit-interval 40", "train.stop_after_steps", 40),
        ("--reset-attention-mask --eod-mask-loss", "data.isolate_documents", True),
        ("--normalization RMSNorm --norm-epsilon 1e-6", "model.norm_eps", 1e-6),
        ("--fp32-residual-connection", "model.residual_dtype", "float32"),
        ("--seed 7", "train.seed", 7),
        ("--hidden-dropout 0.05", "model.hidden_dropout", 0.05),
        ("--hidden-dropout 0.05", "model.embedding_dropout", 0.05),
        ("--wandb-project x", "logging.wandb_project", "x"),
    ],
)
def test_flag_becomes_a_key(flags, field, value):
    found = _config(SMALL + flags)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("flags", "verdict", "key"),
    [
        ("--fp16", "differs", "--hysteresis (default)"),
        ("--fp16 --loss-scale 512", "differs", "--loss-scale 512"),
        ("--optimizer sgd", "differs", "--optimizer sgd"),
        ("--num-experts 8", "differs", "--num-experts 8"),
        ("--quick-geglu", "differs", "--quick-geglu"),
        ("--activation-func mish", "differs", "--activation-func mish"),
        ("--rotary-percent 0.5", "differs", "--rotary-percent 0.5"),
        ("--recompute-activations", "differs", "--recompute-granularity selective"),
        ("--lr-decay-style square", "differs", "--lr-decay-style square"),
        ("--lr-warmup-init 1e-5", "no effect", "--lr-warmup-init"),
        ("--lr ${LR} --lr-warmup-iters 5 --lr-warmup-init 1e-5", "fill in", "--lr-warmup-init"),
        ("--lr-decay-style inverse-square-root --lr-warmup-iters 0", "fill in", "schedule"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 7", "differs", "--lr-wsd-decay-style exponential"),
        ("--normalization L2", "differs", "--normalization L2"),
        ("--eval-iters 0", "differs", "--eval-iters 0"),
        ("--deepspeed", "differs", "--deepspeed"),
        ("--yaml-cfg run.yaml", "differs", "--yaml-cfg"),
        ("--tokenizer-model hub/name", "differs", "--tokenizer-model hub/name"),
        ("--num-query-groups 2", "no effect", "--num-query-groups"),
        ("--sequence-parallel", "no effect", "--sequence-parallel"),
        ("--expert-model-parallel-size 1", "no effect", "--expert-model-parallel-size 1"),
        ("--expert-model-parallel-size 2", "not available", "--expert-model-parallel-size 2"),
        ("--moe-aux-loss-coeff 0.0", "no effect", "--moe-aux-loss-coeff 0.0"),
        ("--weight-decy 0", "unknown", "--weight-decy 0"),
        ("--torch-fsdp2-no-reshard-after-forward", "no effect", "--torch-fsdp2-no-reshard-after-forward"),
        ("--cp-comm-type a2a", "differs", "--cp-comm-type a2a"),
        ("--lr ${LR} --min-lr 1e-5", "fill in", "--min-lr"),
        ("--train-iters ${N} --lr-warmup-fraction 0.1", "fill in", "--lr-warmup-fraction"),
        (f"{VIRTUAL} 2 --num-layers ${{L}} --pipeline-model-parallel-size 2", "fill in", VIRTUAL),
        ("--num-distributed-optimizer-instances 2", "differs", "--num-distributed-optimizer-instances 2"),
        ("--num-distributed-optimizer-instances 1", "no effect", "--num-distributed-optimizer-instances 1"),
        ("--hybrid-layer-pattern M-M*", "not available", "--hybrid-layer-pattern M-M*"),
        ("--mock-data", "not available", "--mock-data"),
        ("--num-workers ${WORKERS}", "fill in", "--num-workers"),
        ("--num-workers 1.5", "fill in", "--num-workers"),
    ],
)
def test_flag_without_an_exact_counterpart_is_reported(flags, verdict, key):
    assert key in _notes(_imported(SMALL + flags), verdict)


def test_number_that_an_override_gives_is_not_to_be_filled_in():
    flags = SMALL.replace("--lr 1e-3", "--lr ${LR} --num-layers ${L} --num-workers 1.5 --norm-epsilon ${E}")
    imported = _imported(flags + "--adam-beta2 ${B}")
    numbers = {"--lr", "--num-layers", "--num-workers", "--adam-beta2"}
    assert set(_notes(imported, "fill in")) >= {*numbers, "--norm-epsilon"}
    imported.override(["optimizer={lr = 1e-4, betas = [0.9, 0.95]}", "data.workers=1", "model.layers=[]"])
    assert not numbers & set(_notes(imported, "fill in"))
    assert "--norm-epsilon" in _notes(imported, "fill in")  # it sets several keys


def test_stages_of_a_rank_are_given_by_layers_or_by_number():
    by_layers = SMALL.replace("--num-layers 2", "--num-layers 8") + "--pipeline-model-parallel-size 2 "
    for flags in ("--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 2"):
        parallel = _config(by_layers + flags).parallel
        assert (parallel.pp, parallel.pp_schedule, parallel.pp_stages_per_rank) == (2, "interleaved", 2)


def test_fsdp_with_a_pipeline_keeps_weights_whole():
    imported = _imported(SMALL + "--pipeline-model-parallel-size 2 --use-torch-fsdp2")
    assert imported.complete
    assert imported.get("parallel.zero") == 1
    assert "--use-torch-fsdp2" in _notes(imported, "differs")


def test_batch_size_follows_from_the_launcher_without_a_flag():
    flags = SMALL.replace("--global-batch-size 8", "--tensor-model-parallel-size 2").replace("\n", " ")
    imported = ImportedConfig("command")
    add_script(f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {flags}", {}, imported)
    assert imported.get("train.global_batch_size") == 2 * 16 // 2
    alone = _imported(flags)
    assert "Megatron-LM uses the micro-batch" in _notes(alone, "fill in")["train.global_batch_size"]
    counted = _imported(flags.replace("--train-iters 100", "--train-samples 800"))
    assert "--train-samples" in _notes(counted, "fill in")


def test_sources_of_the_same_name_and_without_weights():
    sources = _config(SMALL.replace("corpus", "a/text b/text c/text")).data.sources
    assert [(source.name, source.paths, source.weight) for source in sources] == [
        ("text", ["a/text"], None),
        ("text_1", ["b/text"], None),
        ("text_2", ["c/text"], None),
    ]


def test_splits_of_their_own():
    flags = SMALL.replace("--data-path corpus", "--train-data-path a --valid-data-path 0.5 b 0.5 c --test-data-path d")
    data = _config(flags).data
    assert (data.train, data.validation, data.test, data.split) == (["a"], ["b", "c"], ["d"], None)


def test_missing_values_are_to_be_filled_in():
    notes = _notes(_imported("--num-layers 2 --hidden-size 64 --data-path $DATA"), "fill in")
    assert set(notes) >= {"model.vocab_size", "model.layers", "optimizer.lr", "train.steps", "data.sequence_length"}
    assert "the number of its ids" in notes["model.vocab_size"]
    assert notes["data.train.0 = '${DATA}'"] == "give --variable DATA=VALUE, or write the value"


def test_sizes_that_the_mesh_does_not_divide_are_reported():
    notes = _notes(_imported(SMALL + "--tensor-model-parallel-size 3"), "fill in")
    assert any("tp = 3" in f"{key}: {text}" for key, text in notes.items())


@pytest.mark.parametrize(
    "command",
    [
        'CMD="torchrun pretrain_gpt.py $FLAGS 2>&1"; srun --label bash -c "cd code && $CMD | tee log"',
        'run_cmd="deepspeed `pwd`/../pretrain_gpt.py ${FLAGS} &> $LOG/${NAME}.log"\neval ${run_cmd}',
        'LOCAL=1 python -u "$(dirname $0)/pretrain_gpt.py" $FLAGS > log &',
        "$FLAGS",
    ],
    ids=["srun", "eval", "background", "flags"],
)
def test_command_is_found_in_all_its_wrappings(command):
    imported = ImportedConfig("script")
    flags = SMALL.replace("\n", " ")
    script = f'python pretrain_gpt.py --lr 1\nFLAGS="{flags} --save $SAVE"\nset -x\n{command}\nset +x'
    add_script(script, {}, imported)
    assert imported.get("optimizer.lr") == 1e-3
    assert _notes(imported, "differs") == {"pretrain_gpt.py": "ignored; only the last command of a script is read"}
    assert {note.key for note in imported.notes} == {"pretrain_gpt.py", "--save ${SAVE}"}


@pytest.mark.parametrize("program", ["pretrain_bert.py", "pretrain_hybrid.py"])
def test_other_programs_are_reported(program):
    imported = ImportedConfig("command")
    add_script(f"python {program} {SMALL}".replace("\n", " "), {}, imported)
    assert program in _notes(imported, "differs")


@pytest.mark.parametrize(("script", "message"), [("ls -l", "no command passes flags"), ("a='x y", "never closed")])
def test_script_without_a_training_is_refused(script, message):
    with pytest.raises(ConfigError, match=message):
        _imported(script)


def _yaml_of(flags):
    """YAML of the same run: fields of Megatron-LM's config classes, in tables."""
    fields = {name[2:].replace("-", "_"): " ".join(words) if words else True for name, words in flags.items()}
    model = {"add_bias_linear": not fields.pop("disable_bias_linear"), "num_moe_experts": None, "fp8": None}
    return yaml.safe_dump(
        {"language_model": model, "model_parallel": {"cpu_offloading": False, "fp16": False}, **fields}
    )


def test_yaml_gives_the_same_run_as_flags():
    imported = ImportedConfig("run.yaml")
    add_yaml(yaml.safe_load(_yaml_of(parse_flags(LLAMA3.split()))), imported)
    imported.check()
    assert imported.complete, imported.report()
    assert imported.values == _imported(LLAMA3).values


@pytest.mark.parametrize(("fields", "zero"), [({}, 3), ({"torch_fsdp2_reshard_after_forward": False}, 2)])
def test_yaml_turns_off_a_flag_with_no_inside_its_name(fields, zero):
    imported = ImportedConfig("run.yaml")
    add_yaml({"use_torch_fsdp2": True, "torch_fsdp2_reshard_after_forward": True, **fields}, imported)
    assert imported.get("parallel.zero") == zero
    assert _notes(imported, "unknown") == {}


def test_yaml_of_flags():
    imported = ImportedConfig("model_config.yaml")
    flags = {name: " ".join(words) if words else True for name, words in parse_flags(SMALL.split()).items()}
    add_yaml({"TEST_TYPE": "regular", "MODEL_ARGS": {**flags, "--bf16": False}}, imported)
    assert imported.values == _imported(SMALL).values
    assert _notes(imported, "unknown") == {}


@pytest.mark.parametrize(("text", "message"), [("a: [", "invalid YAML"), ("- 1", "not a table")])
def test_bad_yaml_is_refused(text, message):
    with pytest.raises(ConfigError, match=f"run.yaml: {message}"):
        load_yaml(text, "run.yaml")


def test_no_flag_has_two_reasons_or_a_key():
    text = (resources.files("megalin") / "interop/configs/megatron_flags.toml").read_text()
    names = [name for group in tomllib.loads(text)["flags"] for name in group["names"].split()]
    assert len(names) == len(set(names)) == len(reasons())
    imported = _imported(SMALL)
    assert all(name not in reasons() for _, _, source in imported.mapped for name in source.replace(",", "").split())
