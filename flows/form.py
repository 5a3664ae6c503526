"""The form of a custom run on a deployment's page.

It has a short section with what people set, then every other key, folded by section.

The form is the JSON schema of the flow's parameter `changes`, whoever deploys the flow. The
parameter `config`, the deployed configuration, is no part of it: a run has it from its deployment,
and the run itself checks one that is given in its place.
"""

from typing import Annotated, Any

from prefect.utilities.callables import ParameterSchema
from pydantic import (
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    create_model,
)
from pydantic_core import core_schema

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.keys import all_keys
from infini_llama.configs.loading import keys_read, of_new_source, parse_config
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
# The flow's other parameters, which a run has from its deployment.
HIDDEN = ("config", "schedules", "not_text")
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
TEXTS = {"minLength", "maxLength", "pattern"}
Schema = dict[str, Any]


def with_changes(
    config: PipelineConfig,
    changes: dict[str, Any],
    base: PipelineConfig | None = None,
) -> PipelineConfig:
    """The configuration with what a form sent, or a program.

    A program may also name a key of the first section in its own section.

    Args:
        config: of this run, with the overrides of its schedule.
        base: the deployed configuration, whose values the form shows; None: `config`. A value that
            is the same is not a change: the override of a schedule stays.

    Raises:
        ConfigError: a key is unknown or named twice, or a value is not allowed.
    """
    settings = config.model_dump(mode="json", exclude={"deployment"})
    base = base or config
    shown = base.model_dump(mode="json", exclude={"deployment"})
    deployed = {name: shown[section][key] for name, (section, key) in SHORT.items()}
    changes = _with_short_keys(changes, deployed)
    for section, values in changes.items():
        if section in SHORT:
            continue
        if section not in settings:
            raise ConfigError(
                f"changes.{section}: unknown; a form has {', '.join([*SHORT, *settings])}."
            )
        for key, value in _without_shown(values, shown[section]).items():
            # A section in a section, as data.tokenizer.
            if isinstance(value, dict) and all_keys().get(f"{section}.{key}"):
                value = _without_shown(value, shown[section][key])
                value = (settings[section][key] or {}) | value
            settings[section][key] = value
    train = _without_shown(changes.get("train"), shown["train"])
    if any(train.get(length) for length in ("num_epochs", "max_tokens")):
        settings["train"] |= {"max_steps": None}
    for name, (section, key) in SHORT.items():
        value = changes.get(name)
        # As Prefect intends (PrefectHQ/prefect-ui-library#2476), the form sends each value of its
        # first section, changed or not.
        if value in (None, deployed[name]):
            continue
        settings[section][key] = value
        if name == "max_steps":
            settings["train"] |= {"num_epochs": None, "max_tokens": None}
        if name == "files" and "files" not in keys_read(settings["data"]):
            settings["data"] |= {"source": "files"}
    if settings["data"]["source"] != config.data.source:
        data = config.data.model_dump(mode="json")
        # The form sends what is unchanged, too.
        changed = {key for key, value in settings["data"].items() if value != data[key]}
        settings["data"] = of_new_source(settings["data"], changed)
    return parse_config(settings)


def _without_shown(
    values: dict[str, Any] | None, shown: dict[str, Any] | None
) -> dict[str, Any]:
    """The values of a section without those that the form showed, which it sends along."""
    shown = shown or {}
    return {
        key: value
        for key, value in (values or {}).items()
        if key not in shown or value != shown[key]
    }


def _with_short_keys(
    changes: dict[str, Any], deployed: dict[str, Any]
) -> dict[str, Any]:
    """The changes with the keys of `SHORT` in the first section alone.

    For example, {"data": {"files": …}} becomes {"files": …}.

    Args:
        deployed: values of these keys, which a form sends along.
    """
    moved = dict(changes)
    for name, (section, key) in SHORT.items():
        within = moved.get(section)
        if not isinstance(within, dict) or key not in within:
            continue
        moved[section] = {
            other: value for other, value in within.items() if other != key
        }
        if moved.get(name) not in (None, deployed[name], within[key]):
            raise ConfigError(
                f"changes.{name}={moved[name]!r} and changes.{section}.{key}={within[key]!r} are "
                "the same key; give one of them."
            )
        moved[name] = within[key]
    return moved


def _as_config(value: object) -> PipelineConfig:
    if isinstance(value, PipelineConfig):
        return value
    return parse_config(value)  # pyright: ignore[reportArgumentType]


# Annotation of the flow's parameter `config`: a configuration, or its JSON, which is checked as a
# file is. It has no schema of its own: Prefect 3.9.1 would make it in every run, and no page shows
# it. No issue upstream is known.
AS_CONFIG = GetPydanticSchema(
    lambda *_: core_schema.no_info_plain_validator_function(_as_config)
)


class ChangesForm:
    """Annotation of a parameter that holds changes of a configuration.

    It gives the parameter the form as its JSON schema.

    Args:
        deployed: values that the form shows; None: it shows none, and what is left empty stays as
            deployed.
    """

    def __init__(self, deployed: PipelineConfig | None = None) -> None:
        self.deployed = (
            {}
            if deployed is None
            else deployed.model_dump(mode="json", exclude={"deployment"})
        )

    def __get_pydantic_json_schema__(
        self, _: object, handler: GetJsonSchemaHandler
    ) -> Schema:
        config_schema = handler(PipelineConfig.__pydantic_core_schema__)
        whole = handler.resolve_ref_schema(config_schema)["properties"]
        sections = {
            name: handler.resolve_ref_schema(part) for name, part in whole.items()
        }
        for name, section in sections.items():
            _fill(section, self.deployed.get(name, {}), handler)
        properties: dict[str, Schema] = {}
        for position, (name, (section, key)) in enumerate(SHORT.items()):
            properties[name] = sections[section]["properties"].pop(key) | {
                "position": position
            }
            # A form shows `properties` only, so that the key is in it once. Who writes it below its
            # section, as in a file, is not refused by the server.
            sections[section].setdefault("patternProperties", {})[f"^{key}$"] = True
        properties["name"]["description"] += (
            " It also names the flow run: Prefect's own field Run Name is not used."
        )
        for position, (name, section) in enumerate(sections.items(), len(SHORT)):
            section["title"] = "Change"
            folded = [
                {"type": "null", "title": "As deployed"},
                {"$ref": whole[name]["$ref"]},
            ]
            words = {"title": name, "description": section.get("description", "")}
            properties[name] = words | {"anyOf": folded, "position": position}
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }


class ClosedSchema(ParameterSchema):
    """Prefect's record of a schema, with the keywords that it has no field for.

    They refuse a run with an unknown parameter: the server would accept it, and it would crash.
    """

    model_config = ConfigDict(extra="allow")


def form(config: PipelineConfig) -> ParameterSchema:
    """The schema of the parameters of a deployment of `config`.

    Prefect's pages make the form from it, and its server checks values by it.
    """
    changes = Field(
        default_factory=dict,
        title="Run",
        description="What this run changes of the deployed configuration.",
        json_schema_extra={"position": 0},
    )
    annotation = Annotated[dict[str, Any], ChangesForm(config)]
    model = create_model("Parameters", changes=(annotation, changes))
    schema = model.model_json_schema(ref_template="#/definitions/{model}")
    # As in the sections: the form does not show them, and the server does not refuse them.
    schema["patternProperties"] = {f"^{name}$": True for name in HIDDEN}
    schema["additionalProperties"] = False
    return ClosedSchema(definitions=schema.pop("$defs"), **schema)


def _explicit(field: Schema) -> Schema:
    """A field whose error names the limit.

    As usual for JSON schemas, the error for a union only reports that no branch is valid. A limit
    of numbers does not apply to text, nor one of text to numbers, so both can stand beside the
    union. A null that is the default of a plain type is left out, since the server of Prefect 3.9.1
    intentionally allows it for every such field without a default.
    """
    branches = field.get("anyOf")
    if branches is None:
        return field
    field = {**field}
    branches = [{**branch} for branch in branches]
    values = [branch for branch in branches if branch.get("type") != "null"]
    is_plain_type = len(values) == 1 and "type" in values[0] and "enum" not in values[0]
    if is_plain_type and field.get("default", "") is None:
        del field["default"]
        branches = values
    for limits, kinds in ((NUMBERS, ("integer", "number")), (TEXTS, ("string",))):
        limited = [branch for branch in branches if branch.get("type") in kinds]
        if len(limited) == 1:
            for name in limits & limited[0].keys():
                field[name] = limited[0].pop(name)
    if len(branches) == 1:
        del field["anyOf"]
        return field | branches[0]
    return field | {"anyOf": branches}


def _fill(
    section: Schema, values: dict[str, Any], handler: GetJsonSchemaHandler
) -> None:
    """Make what is deployed the default of each field, and nothing else.

    The fields are those of a section and of the sections within it.
    """
    fields = section["properties"]
    for key, field in fields.items():
        if "$ref" in field:
            _fill(handler.resolve_ref_schema(field), values.get(key) or {}, handler)
            continue
        # A part is, for example, one source of a mixture.
        for part in (*field.get("anyOf", ()), field.get("items", {})):
            inner = handler.resolve_ref_schema(part).get("properties", {})
            inner.update(
                {name: _explicit(part_field) for name, part_field in inner.items()}
            )
        field = _explicit(field)
        field.pop("default", None)
        if key in values and (values[key] is not None or "anyOf" in field):
            field["default"] = values[key]
        fields[key] = field
