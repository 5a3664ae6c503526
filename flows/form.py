"""The form of a custom run on a deployment's page: a short section with what people set, then every other key, folded by section.

The form is the flow's parameter `changes`. The parameter `config`, the deployed configuration, is no part of it: a run has it from
its deployment, and the run itself checks one that is given in its place.
"""

from typing import Any

from prefect.utilities.callables import ParameterSchema

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import PipelineConfig

# What the first section shows, in this order; the sections below do not repeat it.
SHORT = {
    "name": ("runtime", "name"),
    "files": ("data", "files"),
    "hidden_size": ("model", "hidden_size"),
    "num_hidden_layers": ("model", "num_hidden_layers"),
    "attention": ("model", "attention"),
    "max_steps": ("train", "max_steps"),
    "global_batch_size": ("train", "global_batch_size"),
    "learning_rate": ("train", "learning_rate"),
    "device": ("environment", "device"),
    "nproc_per_node": ("environment", "nproc_per_node"),
}
# What a value of the first section replaces: the same in another unit, or text from another place.
INSTEAD = {"max_steps": {"train": {"num_epochs": None, "max_tokens": None}}, "files": {"data": {"source": "files"}}}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
TEXTS = {"minLength", "maxLength", "pattern"}
Schema = dict[str, Any]


def changed(config: PipelineConfig, changes: dict[str, Any]) -> PipelineConfig:
    """The configuration with what a form sent.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """
    settings = config.model_dump(mode="json", exclude={"deployment"})
    deployed = {name: settings[section][key] for name, (section, key) in SHORT.items()}
    for section in (name for name in changes if name not in SHORT):
        if section not in settings:
            raise ConfigError(f"changes.{section}: unknown; a form has {', '.join([*SHORT, *settings])}.")
        settings[section] |= changes[section] or {}
    if any((changes.get("train") or {}).get(length) for length in ("num_epochs", "max_tokens")):
        settings["train"]["max_steps"] = None
    # the form sends each value of its first section, changed or not
    for name, value in ((name, changes[name]) for name in SHORT if changes.get(name) not in (None, deployed[name])):
        section, key = SHORT[name]
        settings[section][key] = value
        for other, values in INSTEAD.get(name, {}).items():
            settings[other] |= values
    return parse_config(settings)


def form(config: PipelineConfig) -> ParameterSchema:
    """The schema of the parameters of a deployment of `config`: Prefect's pages make the form from it, its server checks values by it."""
    plain = PipelineConfig.model_json_schema(ref_template="#/definitions/{model}")
    definitions: dict[str, Schema] = plain["$defs"]
    for definition in definitions.values():
        for name, field in definition.get("properties", {}).items():
            definition["properties"][name] = _explicit(field)
    deployed = config.model_dump(mode="json", exclude={"deployment"})
    sections = {name: part["$ref"].rpartition("/")[2] for name, part in plain["properties"].items()}
    properties: dict[str, Schema] = {}
    for position, (name, (section, key)) in enumerate(SHORT.items()):
        field = definitions[sections[section]]["properties"].pop(key)
        properties[name] = _filled(field, deployed[section][key]) | {"position": position}
    properties["name"]["description"] += " It also names the flow run: Prefect's own field Run Name is not used."
    for position, (section, definition) in enumerate(sections.items(), len(SHORT)):
        _fill(definitions, definition, deployed[section])
        definitions[definition]["title"] = "Change"
        field = PipelineConfig.model_fields[section]
        folded = [{"type": "null", "title": "As deployed"}, {"$ref": f"#/definitions/{definition}"}]
        words = {"title": field.title, "description": field.description}
        properties[section] = words | {"anyOf": folded, "position": position}
    described = {"title": "Run", "description": "What this run changes of the deployed configuration."}
    return ParameterSchema(
        title="Parameters",  # a default that is not set is not sent either
        type="object",
        properties={"changes": {"$ref": "#/definitions/Changes", "position": 0} | described},
        definitions={
            "Changes": {"type": "object", "properties": properties, "additionalProperties": False},
            **definitions,
        },
    )


def _explicit(field: Schema) -> Schema:
    """A field whose error names the limit: JSON Schema says of a union only that no branch is valid.

    A limit of numbers does not apply to text, nor one of text to numbers, so both can stand beside the union. A null that is the
    default of a plain type is left out, since Prefect's server allows it for every such field without a default.
    """
    branches = field.get("anyOf")
    if branches is None:
        return field
    field, branches = {**field}, [{**branch} for branch in branches]
    given = [branch for branch in branches if branch.get("type") != "null"]
    if field.get("default", "") is None and len(given) == 1 and "type" in given[0] and "enum" not in given[0]:
        del field["default"]
        branches = given
    for limits, kinds in ((NUMBERS, ("integer", "number")), (TEXTS, ("string",))):
        limited = [branch for branch in branches if branch.get("type") in kinds]
        if len(limited) == 1:
            field |= {name: limited[0].pop(name) for name in limits & limited[0].keys()}
    if len(branches) == 1:
        del field["anyOf"]
        return field | branches[0]
    return field | {"anyOf": branches}


def _filled(field: Schema, value: object) -> Schema:
    return field if value is None else field | {"default": value}


def _fill(definitions: dict[str, Schema], name: str, values: dict[str, Any]) -> None:
    """Make what is deployed the default of each field of a section and of the sections within it."""
    properties = definitions[name].get("properties", {})
    for key, field in properties.items():
        if "$ref" in field and isinstance(values.get(key), dict):
            _fill(definitions, field["$ref"].rpartition("/")[2], values[key])
        elif key in values:
            properties[key] = _filled(field, values[key])
