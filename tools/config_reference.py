"""Prints docs/configuration.md: every key of a run's config, from the docstrings of the config classes.

python tools/config_reference.py > docs/configuration.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import megalin.train.config as run
from megalin.config import Config, field_docstrings
from megalin.data.config import ClassificationConfig, MaskingConfig, PhaseConfig, SourceConfig
from megalin.layers.config import MixerConfig, config_class, mixer_types
from megalin.layers.mixer_configs.softmax import RopeScalingConfig
from megalin.model.config import BlockConfig, EncoderConfig, ModelConfig
from megalin.train.precision import LossScaleConfig

HEAD = """\
# Configuration

Written by `python tools/config_reference.py > docs/configuration.md`, from the docstrings of the config classes; a test
keeps it up to date.

A run is a TOML file. Any key can be overridden on the command line as `table.key=value`, the value in TOML's spelling;
an element of a list goes by its index: `model.layers.0.repeat=3`. The value `null` takes a key back to its default, as
if neither the file nor its base or preset had it: `data.validation=null` (the text is `"null"`). Unknown keys and
values out of range are errors, all reported at once. `megalin config FILE [key=value ...]` checks all that `train`
refuses before its first step without reading data, and prints the config with every default written out; the run
folder keeps the same as `config.toml`.

Two keys at the top of a file, before its tables, serve families of configs:

| key | meaning |
| --- | --- |
| `base` | another config file, relative to this one; this file's tables change its keys one by one, lists as a whole |
| `overrides` | list of `table.key=value`, for keys inside lists and presets; in the order base, file, command line |

A "required" key has no default. "left out": the key is absent by default, which has a meaning of its own.
"""
MODEL_HEAD = """\
Instead of the keys below, `preset = "NAME"` takes a preset's table (`megalin params` lists the names); other keys of
the table override its values, and overrides such as `model.layers.0.repeat=3` change its blocks.
"""
ENCODER_HEAD = """\
With `kind = "encoder"` a model has these keys and a `[data.masking]` table, or with `num_classes` a
`[data.classification]` table; its blocks take mixers that attend to later tokens too, and channel mixers.
"""
MIXER_HEAD = """\
Keys of every type:
"""
WORDS = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def kind(schema: dict[str, Any]) -> str:
    """Describes a JSON schema in words: type and limits, or choices."""
    if "anyOf" in schema:
        return " or ".join(kind(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "$ref" in schema:
        return "table, see below"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        count = f"{schema['minItems']} " if schema.get("minItems") == schema.get("maxItems", 0) else ""
        return f"list of {count}{kind(schema['items'])}"
    if schema.get("type") == "object":
        return f"table of {kind(schema['additionalProperties'])}"
    limits = [f"{sign} {schema[key]:g}" for key, sign in LIMITS.items() if key in schema]
    return ", ".join([" ".join([WORDS[schema["type"]], *limits[:1]]), *limits[1:]])


def default(cls: type[Config], name: str) -> str:
    """Default of a field in TOML's spelling."""
    field = cls.model_fields[name]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "left out" if value is None else f"`{json.dumps(value)}`"


def table(cls: type[Config], leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the table of a class's own values; nested tables have their own sections."""
    yield "| key | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    properties, docstrings = cls.model_json_schema()["properties"], field_docstrings(cls)
    for name in cls.model_fields:
        if name not in leave_out:
            meaning = " ".join(docstrings.get(name, "").split()).replace("|", "\\|")
            yield f"| `{name}` | {kind(properties[name])} | {default(cls, name)} | {meaning} |"


def section(title: str, cls: type[Config], *, head: str = "", leave_out: tuple[str, ...] = ()) -> str:
    """Formats a heading, the docstring of the class and its table."""
    lines = [f"## {title}", "", " ".join((cls.__doc__ or "").split()), ""]
    return "\n".join([*lines, *([head] if head else []), *table(cls, leave_out), ""])


def reference() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for name, field in run.RunConfig.model_fields.items():
        cls = field.annotation
        if name == "model":
            parts.append(section("`[model]`", ModelConfig, head=MODEL_HEAD, leave_out=("layers",)))
            title = '`[model]` with `kind = "encoder"`'
            parts.append(section(title, EncoderConfig, head=ENCODER_HEAD, leave_out=("layers",)))
            parts.append(section("`[[model.layers]]`", BlockConfig, leave_out=("sublayers",)))
            parts.append(section("`sublayers` of `[[model.layers]]`", MixerConfig, head=MIXER_HEAD))
            common = tuple(MixerConfig.model_fields)
            for mixer in mixer_types():
                config = config_class(mixer)
                parts.append(section(f'`sublayers` with `type = "{mixer}"`', config, leave_out=common))
                if mixer == "softmax":
                    parts.append(section("`rope_scaling` of softmax attention", RopeScalingConfig))
            continue
        assert isinstance(cls, type), name
        parts.append(
            section(f"`[{name}]`", cls, leave_out=("masking", "classification", "sources", "phases", "loss_scale"))
        )
        if name == "train":
            parts.append(section("`[train.loss_scale]`", LossScaleConfig))
        if name == "data":
            parts.append(section("`[[data.sources]]`", SourceConfig))
            parts.append(section("`[[data.phases]]`", PhaseConfig))
            parts.append(section("`[data.masking]`", MaskingConfig))
            parts.append(section("`[data.classification]`", ClassificationConfig))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
