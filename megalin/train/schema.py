"""JSON schema of config files, with which editors complete keys, show their meaning and mark mistakes."""

from __future__ import annotations

from typing import Any, get_args

from megalin.config import Config, field_docstrings
from megalin.layers.config import config_class, mixer_types
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
    classes, mixers = _tables(RunConfig), []
    for name in mixer_types():
        cls = config_class(name)
        mixer = cls.model_json_schema(ref_template=_REFERENCE)
        definitions |= mixer.pop("$defs", {})
        definitions[cls.__name__] = mixer
        classes |= _tables(cls)
        mixers.append({"$ref": _REFERENCE.format(model=cls.__name__)})
    for name, definition in [*definitions.items(), (RunConfig.__name__, schema)]:
        definition.pop("required", None)
        for field, text in field_docstrings(classes[name]).items():
            definition["properties"][field]["description"] = text
    for mixer in mixers:
        definitions[mixer["$ref"].rpartition("/")[2]]["required"] = ["type"]
    external = {"type": "object", "properties": {"type": {"type": "string", "pattern": r"\."}}, "required": ["type"]}
    definitions["BlockConfig"]["properties"]["sublayers"]["items"] = {"anyOf": [*mixers, external]}
    preset = {"type": "string", "enum": preset_names(), "description": "A named model; other keys change it."}
    for name in ("ModelConfig", "EncoderConfig"):
        definitions[name]["properties"]["preset"] = preset
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


def _tables(annotation: Any) -> dict[str, type[Config]]:
    """The config classes in an annotation and in the fields of these classes, by name."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        inner, found = (
            [field.annotation for field in annotation.model_fields.values()],
            {annotation.__name__: annotation},
        )
    else:
        inner, found = list(get_args(annotation)), {}
    for each in inner:
        found |= _tables(each)
    return found
