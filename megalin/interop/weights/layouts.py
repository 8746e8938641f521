"""Selection of a layout for a folder or for a model, and the check that a class can express the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megalin.config import parse
from megalin.errors import CheckpointError, ConfigError
from megalin.interop.weights import gla_retnet, hgrn2, llama, mamba, mamba2, rodimus, transnormerllm
from megalin.interop.weights.layout import CheckpointLayout
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig

LAYOUTS = (
    transnormerllm.TRANSNORMERLLM,
    hgrn2.HGRN2,
    rodimus.FLA,
    rodimus.FLA_PLUS,
    rodimus.CODEFUSE,
    rodimus.CODEFUSE_PLUS,
    llama.LLAMA,
    llama.MISTRAL,
    llama.QWEN2,
    llama.QWEN3,
    mamba.MAMBA,
    mamba2.MAMBA2,
    gla_retnet.GLA,
    gla_retnet.RETNET,
)
FORMATS = sorted({layout.format for layout in LAYOUTS})
_MAX_DIFFERENCES = 8
_NOT_COMPARED = ("init_std", "output_init", "embedding_dropout", "hidden_dropout", "layers")
"""Fields of a model that affect only its initial weights or its training, and `layers`, which is compared block by
block."""


def layout_of_model(model: ModelConfig, form: str | None) -> CheckpointLayout:
    """The layout for the model's blocks: the first one, or that of the format `form`.

    Raises:
        ConfigError: no class has such blocks, or none of that format; or the class computes something else.
    """
    kinds = {tuple(sublayer.type for sublayer in block.sublayers) for _, block in model.blocks()}
    fitting = [layout for layout in LAYOUTS if kinds == {layout.sublayers} and layout.fits(model)]
    if not fitting:
        described = " and ".join(f"[{', '.join(kind)}]" for kind in sorted(kinds))
        known = "; ".join(f"[{', '.join(layout.sublayers)}]: {layout.title}" for layout in LAYOUTS)
        raise ConfigError(f"model.layers: no external class has blocks of {described}; supported: {known}")
    chosen = [layout for layout in fitting if form in (None, layout.format)]
    if not chosen:
        formats = " or ".join(layout.format for layout in fitting)
        raise ConfigError(f"--format {form}: this model has no class in this format; use --format {formats}")
    check_expressible(model, chosen[0])
    return chosen[0]


def check_expressible(model: ModelConfig, layout: CheckpointLayout) -> None:
    """Compares the model with the one read back from its own config.json.

    A norm without weights passes as one with a weight of ones.

    Raises:
        ConfigError: names each field that the class cannot represent, with both values.
    """
    settings = layout.complete(Settings(layout.to_settings(model), "config.json"))
    read_back = parse(ModelConfig, layout.to_model(settings), layout.title)
    ours, theirs = dict(_effective_fields(model, model)), dict(_effective_fields(read_back, model))
    problems = [
        f"{name} = {value!r}: the class has {theirs.get(name)!r}"
        for name, value in ours.items()
        if not _equal(value, theirs.get(name)) and (value, theirs.get(name)) != ("srmsnorm", "rmsnorm")
    ]
    if problems:
        raise ConfigError(
            f"{layout.title} cannot express this model; change it to the values of the class:\n  "
            + "\n  ".join(problems[:_MAX_DIFFERENCES])
        )


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return bool(ours == theirs)


def _effective_fields(model: ModelConfig, names: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yields the fields that determine the computation, with defaults filled in; blocks are named as in `names`."""
    for field, value in model.model_dump(exclude=set(_NOT_COMPARED)).items():
        yield f"model.{field}", value
    for (path, _), (_, block) in zip(names.blocks(), model.blocks(), strict=True):
        for index, sublayer in enumerate(block.sublayers):
            fields = sublayer.model_dump(exclude={"chunk_size"})
            defaults = {
                "num_key_value_heads": fields.get("num_heads"),
                "head_dim": model.hidden_size // fields.get("num_heads", 1),
                "input_gate_rank": max(model.hidden_size // 64, 16),
                "step_rank": -(-model.hidden_size // 16),
                "output_norm_eps": fields["norm_eps"],
                "slopes": "retnet",
                "decay_gate": "sigmoid",
                "temperature": 16.0,
                "rope_base": 10000.0,
            }
            for field, value in fields.items():
                yield f"{path}.sublayers.{index}.{field}", defaults.get(field) if value is None else value


def layouts_of_folder(settings: Settings) -> list[CheckpointLayout]:
    """The layouts of the class in config.json; the first one's `to_model` reads config.json for all of them.

    Raises:
        CheckpointError: an unsupported class; the message lists the supported ones.
    """
    named = settings.values.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    fitting = [
        layout
        for layout in LAYOUTS
        if architecture == layout.architecture and all(settings.has(key) for key in layout.required_keys)
    ]
    if not fitting:
        known = ", ".join(dict.fromkeys(layout.title for layout in LAYOUTS))
        raise CheckpointError(
            f"{settings.source}: architectures = {named!r} (model_type = {settings.values.get('model_type')!r}) is not "
            f"supported; supported: {known}"
        )
    return fitting
