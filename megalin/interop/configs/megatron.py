"""A Megatron-LM run as megalin's tables: data, loop, optimizer, schedule and mesh. The model: megatron_model.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from megalin.interop.configs.flags import Flags, read_command, yaml_flags
from megalin.interop.configs.imported import ImportedConfig
from megalin.interop.configs.loss_scale import add_loss_scale, scaling_of_flags
from megalin.interop.configs.megatron_model import add_model
from megalin.interop.configs.recognition import recognized_as

_SEED = 1234
_SPLIT = "969,30,1"
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
_TRAIN = ("--train-iters", "--train-samples", "--train-tokens")
_DECAY = ("--lr-decay-iters", "--lr-decay-samples", "--lr-decay-tokens")
_WARMUP = ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-tokens")
_STYLES = {
    "constant": "constant",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "linear": "linear",
    "WSD": "wsd",
}
"""Types of schedule by `--lr-decay-style`."""
_TOKENIZER_FILES = (".json", ".model", ".tiktoken")


def add_script(text: str, variables: Mapping[str, str], imported: ImportedConfig) -> None:
    """Reads the run that a script, a command or a line of flags starts.

    Args:
        variables: environment variables by name, and the script's own arguments by number.

    Raises:
        ConfigError: a script that cannot be read, or no training command in it.
    """
    command = read_command(text, variables, imported)
    if command.program and "gpt" not in PurePath(command.program).name:
        imported.note("differs", command.program, "read as pretrain_gpt.py: a decoder of attention and MLP")
    with recognized_as("Megatron-LM", imported, imported.source, keys=len(command.flags)):
        add_run(Flags(command.flags, imported), imported, ranks=_ranks(command.launcher))


def add_yaml(values: Mapping[Any, Any], imported: ImportedConfig) -> None:
    """Reads the run of a file for --yaml-cfg, or of a file with flags under MODEL_ARGS."""
    flags = yaml_flags(values)
    with recognized_as("Megatron-LM", imported, imported.source, keys=len(flags)):
        add_run(Flags(flags, imported), imported, ranks=None)


def add_run(
    flags: Flags,
    imported: ImportedConfig,
    *,
    ranks: int | None,
    model: Callable[[Flags, ImportedConfig], None] = add_model,
) -> None:
    """Reads every flag into the tables of a run; `ranks` is None if the launcher's words do not give them.

    `model` reads the network.
    """
    model(flags, imported)
    _add_mesh(flags, imported)
    _add_batch(flags, imported, ranks)
    _add_loop(flags, imported)
    _add_optimizer(flags, imported)
    _add_schedule(flags, imported)
    _add_data(flags, imported)
    if flags.has("--yaml-cfg"):
        imported.note("differs", "--yaml-cfg", "Megatron-LM reads that file instead of flags; import it")
    flags.report_unread()


def _ranks(launcher: list[str]) -> int | None:
    """The number of ranks that torchrun or deepspeed starts, if its words give the ranks per node."""
    text = " ".join(launcher)
    local = re.search(r"--(?:nproc[_-]per[_-]node|num_gpus|num_accelerators)[ =]([0-9]{1,9})(?= |$)", text)
    nodes = re.search(r"--(?:nnodes|num_nodes)[ =]([0-9]{1,9})(?= |$)", text)
    return int(local[1]) * int(nodes[1] if nodes else 1) if local else None


def _add_mesh(flags: Flags, imported: ImportedConfig) -> None:
    for key, *names in (
        ("tp", "--tensor-model-parallel-size", "--model-parallel-size"),
        ("cp", "--context-parallel-size"),
        ("pp", "--pipeline-model-parallel-size"),
    ):
        for name in names:
            if (size := flags.integer(name, f"parallel.{key}")) is not None:
                imported.set(f"parallel.{key}", size, name)
    tp, pp = imported.get("parallel.tp") or 1, imported.get("parallel.pp") or 1
    if flags.has("--sequence-parallel"):
        if tp > 1:
            imported.set("parallel.sequence_parallel", True, "--sequence-parallel")
        else:
            imported.note("no effect", "--sequence-parallel", "it needs a tensor-parallel size above 1")
    _add_stages(flags, imported, pp)
    for name in ("--deepspeed", "--deepspeed_config"):
        if flags.has(name) and imported.get("train.engine") is None:
            imported.note("differs", name, "the engine is fsdp2; for DeepSpeed, give its JSON (--deepspeed-config)")
    zero, source = 0, "no --use-distributed-optimizer"
    if flags.has("--use-distributed-optimizer"):
        zero, source = 1, "--use-distributed-optimizer"
    strategy = flags.text("--data-parallel-sharding-strategy", "optim_grads_params")
    no_reshard = flags.given("--torch-fsdp2-no-reshard-after-forward")
    if flags.has("--use-torch-fsdp2"):
        zero, source = (2, f"--use-torch-fsdp2 {no_reshard}") if no_reshard else (3, "--use-torch-fsdp2")
    elif no_reshard:
        imported.note("no effect", no_reshard, "Megatron-LM reads it only together with --use-torch-fsdp2")
    if flags.has("--use-megatron-fsdp"):
        zero, source = _STRATEGIES.get(strategy, 3), "--use-megatron-fsdp --data-parallel-sharding-strategy"
    if (stage := flags.integer("--zero-stage", "parallel.zero")) is not None:
        zero, source = stage, "--zero-stage"
    if imported.get("parallel.zero") is not None and stage is None:
        return  # set by a DeepSpeed JSON
    if pp > 1 and zero > 1:
        imported.note(
            "differs", source, f"parallel.zero = 1 instead of {zero}, which would gather in every micro-batch"
        )
        zero = 1
    imported.set("parallel.zero", zero, source)


def _add_stages(flags: Flags, imported: ImportedConfig, pp: int) -> None:
    """Reads the pipeline stages per rank, given as layers per stage or as the number of stages."""
    key, source = "parallel.pp_stages_per_rank", "--num-virtual-stages-per-pipeline-rank"
    layers, stages = flags.integer("--num-layers", "model.layers"), flags.integer(source, key)
    each = flags.integer("--num-layers-per-virtual-pipeline-stage", key)
    if pp > 1 and stages is None and each:
        source = "--num-layers-per-virtual-pipeline-stage"
        if layers is None:
            imported.missing(key, source, "it divides --num-layers, which is missing or not a number")
        else:
            stages = layers // (pp * each)
    if stages is not None and stages > 1 and pp > 1:
        imported.set("parallel.pp_schedule", "interleaved", source)
        imported.set(key, stages, source)


def _add_batch(flags: Flags, imported: ImportedConfig, ranks: int | None) -> None:
    micro = flags.integer("--micro-batch-size", "train.micro_batch_size")
    batch = flags.integer("--global-batch-size", "train.global_batch_size")
    if micro is None:
        micro = flags.integer("--batch-size", "train.micro_batch_size")
    if micro is not None:
        imported.set("train.micro_batch_size", micro, flags.given("--micro-batch-size", "--batch-size"))
    source = "--global-batch-size"
    if batch is None and micro is not None and ranks is not None:
        width = 1
        for axis in ("tp", "cp", "pp"):
            width *= imported.get(f"parallel.{axis}") or 1
        batch, source = (
            micro * max(1, ranks // width),
            f"--micro-batch-size times the data-parallel size of {ranks} ranks",
        )
    if batch is not None:
        imported.set("train.global_batch_size", batch, source)
    else:
        imported.hint("train.global_batch_size", "Megatron-LM uses the micro-batch size times the data-parallel size")


def _add_loop(flags: Flags, imported: ImportedConfig) -> None:
    seed = flags.integer("--seed", "train.seed")
    imported.set("train.seed", _SEED if seed is None else seed, flags.given("--seed") or "--seed's default")
    _add_precision(flags, imported)
    granularity = flags.text("--recompute-granularity")
    full, selective = flags.has("--checkpoint-activations"), flags.has("--recompute-activations")
    if full or granularity == "full":
        imported.set("train.recompute", True, "--recompute-granularity full")
    if selective or granularity == "selective":
        text = "a block is recomputed in full (train.recompute = true) or not at all"
        imported.note("differs", "--recompute-granularity selective", text)
    evaluations = flags.integer("--eval-iters", "train.evaluate_batches")
    for key, name in (
        ("train.evaluate_every_steps", "--eval-interval"),
        ("train.log_every_steps", "--log-interval"),
        ("train.stop_after_steps", "--exit-interval"),
        ("checkpoint.every_steps", "--save-interval"),
        ("checkpoint.every_steps", "--persistent-save-interval"),
    ):
        if (interval := flags.integer(name, key)) is not None and not (name == "--eval-interval" and evaluations == 0):
            imported.set(key, interval, name)
    if evaluations:
        imported.set("train.evaluate_batches", evaluations, "--eval-iters")
    elif evaluations == 0:
        text = "a validation split is always evaluated after the last step; leave it out to avoid that"
        imported.note("differs", "--eval-iters 0", text)
    if project := flags.text("--wandb-project"):
        imported.set("logging.wandb_project", project, "--wandb-project")


def _add_precision(flags: Flags, imported: ImportedConfig) -> None:
    if flags.has("--bf16"):
        imported.set("train.dtype", "bfloat16", "--bf16")
    elif flags.has("--fp16"):
        imported.set("train.dtype", "float16", "--fp16")
        add_loss_scale(scaling_of_flags(flags), imported)
    else:
        imported.set("train.dtype", "float32", "neither --bf16 nor --fp16")


def _add_optimizer(flags: Flags, imported: ImportedConfig) -> None:
    kind = flags.text("--optimizer", "adam")
    if kind != "adam":
        text = "the optimizer is AdamW; learning rates of other optimizers do not carry over"
        imported.note("differs", f"--optimizer {kind}", text)
    if (rate := flags.number("--lr", "optimizer.lr")) is not None:
        imported.set("optimizer.lr", rate, "--lr")
    beta1, beta2 = (flags.number(f"--adam-beta{number}", "optimizer.betas") for number in (1, 2))
    betas = [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2]
    imported.set("optimizer.betas", betas, flags.given("--adam-beta1", "--adam-beta2") or "AdamW's 0.9 and 0.999")
    for key, name, default in (("eps", "--adam-eps", 1e-8), ("weight_decay", "--weight-decay", 0.01)):
        value = flags.number(name, f"optimizer.{key}")
        source = name if flags.has(name) else f"{name}'s default"
        imported.set(f"optimizer.{key}", default if value is None else value, source)
    clip = flags.number("--clip-grad", "optimizer.max_grad_norm")
    clip = 1.0 if clip is None else clip
    if clip > 0:
        imported.set("optimizer.max_grad_norm", clip, flags.given("--clip-grad") or "--clip-grad's default")


def _add_schedule(flags: Flags, imported: ImportedConfig) -> None:
    style, peak = flags.text("--lr-decay-style", "linear"), imported.get("optimizer.lr")
    min_lr = flags.number("--min-lr", "schedule.min_lr_ratio") or 0.0
    shape = flags.text("--lr-wsd-decay-style", "exponential")
    steps, final = (
        _add_steps(flags, imported),
        _steps(flags, imported, "schedule.decay_steps", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
    )
    warmup = _steps(flags, imported, "schedule.warmup_steps", *_WARMUP) or 0
    fraction = flags.number("--lr-warmup-fraction", "schedule.warmup_steps")
    if fraction is not None and steps is not None:
        decay = _steps(flags, imported, "train.steps", *_DECAY)
        warmup = round(fraction * (decay or steps))
    elif fraction:
        text = "it is a fraction of the steps, which no flag gives"
        imported.missing("schedule.warmup_steps", "--lr-warmup-fraction", text)
    given = flags.given(*_WARMUP, "--lr-warmup-fraction")
    if warmup:
        imported.set("schedule.warmup_steps", warmup, given)
    elif style == "inverse-square-root" and not given:
        imported.set("schedule.warmup_steps", 1, "Megatron-LM's decay without a warmup")
    _add_warmup_start(flags, imported, peak, given)
    imported.set("schedule.type", _STYLES.get(style, "cosine"), f"--lr-decay-style {style}")
    if style not in _STYLES:
        imported.note("differs", f"--lr-decay-style {style}", f"cosine instead; supported: {', '.join(_STYLES)}")
    if style == "constant":
        return
    if peak:
        imported.set("schedule.min_lr_ratio", min_lr / peak, "--min-lr over --lr")
    elif min_lr:
        imported.missing("schedule.min_lr_ratio", "--min-lr", "it is needed relative to --lr, which no flag gives")
    if style == "WSD":
        if final is not None:
            imported.set("schedule.decay_steps", final, flags.given("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"))
        if shape != "linear":
            imported.note(
                "differs", f"--lr-wsd-decay-style {shape}", "the learning rate always falls linearly at the end"
            )


def _add_warmup_start(flags: Flags, imported: ImportedConfig, peak: float | None, warmup: str) -> None:
    """Sets the start of the warmup, a rate in Megatron-LM and relative to the peak here; `warmup`: its flags."""
    start, name = flags.number("--lr-warmup-init", "schedule.warmup_start_ratio"), "--lr-warmup-init"
    if not start:
        return
    if not warmup:
        imported.note("no effect", name, "there is no warmup")
    elif peak:
        imported.set("schedule.warmup_start_ratio", start / peak, f"{name} over --lr")
    else:
        imported.missing("schedule.warmup_start_ratio", name, "it is needed relative to --lr, which no flag gives")


def _add_steps(flags: Flags, imported: ImportedConfig) -> int | None:
    """The steps of the schedule; if these exceed the steps of the run, the run stops early."""
    steps, decay = _train_steps(flags, imported), _steps(flags, imported, "train.steps", *_DECAY)
    if steps is None:
        return None
    if decay is None or decay <= steps:
        imported.set("train.steps", steps, flags.given(*_TRAIN, *_DECAY))
        if decay is not None and decay < steps:
            text = f"the learning rate reaches its minimum at step {steps}, not at {decay}"
            imported.note("differs", flags.given(*_DECAY), text)
        return steps
    imported.set("train.steps", decay, flags.given(*_DECAY))
    imported.set("train.stop_after_steps", steps, flags.given(*_TRAIN))
    text = f"samples are ordered as for {decay} steps, {steps} of which are run"
    imported.note("differs", flags.given(*_DECAY), text)
    return decay


def _train_steps(flags: Flags, imported: ImportedConfig) -> int | None:
    """Steps of the run: it ends at the earliest of the iterations, samples and tokens; None if none is given."""
    found = {}
    for place, name in enumerate(_TRAIN):
        names = ["", "", ""]
        names[place] = name
        if (steps := _steps(flags, imported, "train.steps", *names)) is not None:
            found[name] = steps
    if not found:
        return None
    first = min(found, key=lambda name: found[name])
    for name, steps in found.items():
        if steps > found[first]:
            imported.note("no effect", name, f"{steps} steps, but {first} ends the run after {found[first]}")
    return found[first]


def _steps(
    flags: Flags, imported: ImportedConfig, key: str, iterations: str, samples: str = "", tokens: str = ""
) -> int | None:
    """Steps for `key`, given as such, as samples (rounded down) or as tokens (rounded up); None if not given.

    Tokens take precedence: Megatron-DeepSpeed counts them and ignores the others. An empty name is not read.
    """
    steps, count, num_tokens = (flags.integer(name, key) if name else None for name in (iterations, samples, tokens))
    batch, length = imported.get("train.global_batch_size"), flags.integer("--seq-length", "data.sequence_length")
    if num_tokens is not None and not length:
        missing = "missing" if length is None else "0"
        imported.missing(key, tokens, f"it counts tokens; the steps follow from --seq-length, which is {missing}")
        num_tokens = None
    if num_tokens is None and (steps is not None or count is None):
        return steps
    if not isinstance(batch, int) or batch < 1:
        missing = "missing" if batch is None else repr(batch)
        name, unit = (samples, "samples") if num_tokens is None else (tokens, "tokens")
        imported.missing(
            key, name, f"it counts {unit}; the steps follow from train.global_batch_size, which is {missing}"
        )
        return None
    if num_tokens is not None and length is not None:
        return int(-(-num_tokens // (length * batch)))
    return int((count or 0) // batch)


def _add_data(flags: Flags, imported: ImportedConfig) -> None:
    if (length := flags.integer("--seq-length", "data.sequence_length")) is not None:
        imported.set("data.sequence_length", length, "--seq-length")
    imported.set("data.order", "megatron", "Megatron-LM's order of samples")
    own = {split: flags.words(f"--{flag}-data-path") for split, flag in _SPLITS.items()}
    blend, source = flags.words("--data-path"), "--data-path"
    if own["train"]:
        blend, source = own["train"], "--train-data-path"
    _add_sources(blend, source, imported)
    for split in ("validation", "test"):
        if own[split]:
            paths = [word for word in own[split] if not _is_number(word)]
            imported.set(f"data.{split}", paths, f"--{_SPLITS[split]}-data-path")
    split = flags.text("--split", _SPLIT)
    if flags.has("--split") or not any(own.values()):
        fractions = [float(fraction) for fraction in re.findall(r"[0-9]+\.?[0-9]*|\.[0-9]+", split)]
        imported.set("data.split", [*fractions, 0.0, 0.0][:3], flags.given("--split") or "--split's default")
    if cache := flags.text("--data-cache-path"):
        imported.set("data.cache", cache, "--data-cache-path")
    isolated = flags.given("--reset-attention-mask", "--dataloader-inter-document-masking")
    imported.set("data.isolate_documents", bool(isolated), isolated or "no --reset-attention-mask")
    if workers := flags.integer("--num-workers", "data.workers"):
        imported.set("data.workers", workers, "--num-workers")
    tokenizer = flags.text("--tokenizer-model")
    if tokenizer.endswith(_TOKENIZER_FILES):
        imported.set("data.tokenizer", tokenizer, "--tokenizer-model")
    elif tokenizer:
        text = "data.tokenizer takes a local tokenizer.json, .model or .tiktoken file"
        imported.note("differs", f"--tokenizer-model {tokenizer}", text)
    for name in ("--mock-data", "--data-args-path", "--per-split-data-args-path"):
        if flags.has(name):
            imported.note("not available", name, "name the shards in data.train or data.sources")


def _add_sources(blend: list[str], source: str, imported: ImportedConfig) -> None:
    """Reads a blend: prefixes, or alternating weights and prefixes."""
    if not blend:
        imported.hint("data", "name the shards with data.train=[...]")
        return
    if len(blend) == 1:
        imported.set("data.train", blend, source)
        return
    weighted = len(blend) % 2 == 0 and all(_is_number(word) for word in blend[::2])
    paths = blend[1::2] if weighted else blend
    names: list[str] = []
    for path in paths:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", PurePath(path).name) or "shard"
        names.append(name if name not in names else f"{name}_{len(names)}")
    sources: list[dict[str, Any]] = [{"name": name, "paths": [path]} for name, path in zip(names, paths, strict=True)]
    for table, weight in zip(sources, blend[::2], strict=False):
        if weighted:
            table["weight"] = float(weight)
    imported.set("data.sources", sources, source)


def _is_number(word: str) -> bool:
    return re.fullmatch(r"\d*\.?\d+(e-?\d+)?", word, re.IGNORECASE) is not None
