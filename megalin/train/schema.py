"""JSON schema of config files, with which editors complete keys, show their meaning and mark mistakes."""

from __future__ import annotations

import importlib
from typing import Any

from megalin.layers.mixers.base import mixer_types
from megalin.model.presets import preset_names
from megalin.train.config import RunConfig

_REFERENCE = "#/$defs/{model}"


def config_schema() -> dict[str, Any]:
    """The schema of a run's TOML file: the fields of the config classes, with their docstrings, limits and defaults.

    No key is required but the `type` of a sub-layer, since a file's `base` or its model's `preset` may have the others.
    A sub-layer's keys are those of its `type`; one of another package has any keys.
    """
    schema = RunConfig.model_json_schema(ref_template=_REFERENCE)
    definitions: dict[str, Any] = schema["$defs"]
    mixers = []
    for name in mixer_types():
        cls = importlib.import_module(f"megalin.layers.mixers.{name}").CONFIG
        mixer = cls.model_json_schema(ref_template=_REFERENCE)
        definitions |= mixer.pop("$defs", {})
        definitions[cls.__name__] = mixer
        mixers.append({"$ref": _REFERENCE.format(model=cls.__name__)})
    for definition in definitions.values():
        definition.pop("required", None)
    for mixer in mixers:
        definitions[mixer["$ref"].rpartition("/")[2]]["required"] = ["type"]
    external = {"type": "object", "properties": {"type": {"type": "string", "pattern": r"\."}}, "required": ["type"]}
    definitions["BlockConfig"]["properties"]["sublayers"]["items"] = {"anyOf": [*mixers, external]}
    preset = {"type": "string", "enum": preset_names(), "description": "A named model; other keys change it."}
    for name in ("ModelConfig", "EncoderConfig"):
        definitions[name]["properties"]["preset"] = preset
    schema.pop("required", None)
    schema["properties"] |= {
        "base": {
            "type": "string",
            "description": "Another config file, relative to this one, whose keys these change.",
        },
        "overrides": {
            "type": "array",
            "items": {"type": "string"},
            "description": "table.key=value for keys inside lists and presets.",
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "megalin config"}
