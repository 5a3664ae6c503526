"""Reads a YAML or JSON file and `key=value` overrides into a PipelineConfig.

One ConfigError lists every problem.
"""

import logging
import re
import types
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import JsonValue

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.keys import place
from infini_llama.configs.problems import shown, validate
from infini_llama.configs.reading import NULLS, JsonObject, parse_yaml, read_mapping
from infini_llama.configs.schema import RUN_NAME, PipelineConfig
from infini_llama.configs.schema.sources import TextConfig, keys_read_by

log = logging.getLogger("infini_llama.configs")
MOST_LINES = 50  # of a message that lists problems


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """The run that `path` describes, with dotted `key=value` overrides on top.

    It is named after the file unless it names itself. A path that does not exist here but names a
    configuration that comes with the program (`configs/tiny.yaml`, `tiny.yaml`, `tiny`) is that
    one. The value of an override is YAML, or, where the key holds text, the text itself. Where null
    is allowed too, an empty value, `null` and `~` are null.

    Raises:
        ConfigError: every problem, one line per problem.
    """
    file = _find(Path(path))
    mapping: JsonObject = read_mapping(file)
    problems: list[str] = []
    source = _source_of(mapping)
    for override in overrides:
        mapping = _override(mapping, override, problems)
    changed = [override.partition("=")[0].strip() for override in overrides]
    if _source_of(mapping) != source and "data" not in changed:
        names = {key.split(".")[1] for key in changed if key.startswith("data.")}
        mapping = {
            **mapping,
            "data": of_new_source(cast("JsonObject", mapping["data"]), names),
        }
    runtime = mapping.get("runtime")
    if runtime is None or (isinstance(runtime, dict) and "name" not in runtime):
        if re.fullmatch(RUN_NAME, file.stem):
            mapping = {**mapping, "runtime": {"name": file.stem, **(runtime or {})}}
        else:
            problems.append(
                f"runtime.name: the file's name {file.stem!r} cannot name the run; set runtime.name"
            )
    config = _checked(mapping, problems, str(path))
    config.data.leave_out(str(file.absolute()), "the configuration")
    return config


def _source_of(mapping: JsonObject) -> JsonValue:
    data = mapping.get("data")
    return data.get("source", "files") if isinstance(data, dict) else None


def keys_read(data: JsonObject) -> set[str]:
    """The keys of the section `data` that its source reads."""
    passkey = data.get("passkey")
    filler = passkey.get("filler") if isinstance(passkey, dict) else None
    return keys_read_by(str(data.get("source")), str(filler))


def of_new_source(data: JsonObject, changed: Collection[str]) -> JsonObject:
    """The section of a text whose `source` was changed, without keys that only its former one read.

    They are logged.

    Args:
        changed: the keys that were set with the new source; they stay, and are refused if it does
            not read them.
    """
    source = data.get("source")
    if source not in get_args(TextConfig.model_fields["source"].annotation):
        return data  # it is refused
    read = keys_read(data)
    former = [
        name
        for name in TextConfig.model_fields
        if name in data and name not in read and name not in changed
    ]
    defaults = TextConfig().model_dump(mode="json")
    named = [f"data.{name}" for name in former if data[name] != defaults[name]]
    if named:
        log.warning("not read with data.source=%s: %s", source, ", ".join(named))
    return {name: value for name, value in data.items() if name not in former}


def refuse_as_new(output: Path) -> None:
    """Check the path of a configuration before it is written.

    Raises:
        ConfigError: `output` exists, has no folder, or is no name of a YAML file.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{output} does not end with .yaml; name another file.")
    if output.exists():
        raise ConfigError(f"{output} already exists; name another file, or remove it.")
    if not output.parent.is_dir():
        raise ConfigError(
            f"{output}: {output.parent} is not a folder; make it, or name another file."
        )


def parse_config(mapping: JsonValue) -> PipelineConfig:
    """The run that a plain dict describes, named `run` unless runtime.name says otherwise.

    Raises:
        ConfigError: every problem, one line per problem.
    """
    if not isinstance(mapping, dict):
        raise ConfigError(
            "a configuration is a mapping with sections such as data, model and train, not "
            f"{shown(mapping)}."
        )
    return _checked(mapping, [], "the configuration")


def _checked(mapping: JsonObject, problems: list[str], origin: str) -> PipelineConfig:
    try:
        config, problems_of_schema = validate(mapping)
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply.") from None
    lines = list(dict.fromkeys(problems + problems_of_schema))
    if config is not None and not lines:
        if config.storage.mirror is not None:
            config.data.leave_out(config.storage.mirror, "storage.mirror")
        return config
    if len(lines) == 1:
        raise ConfigError(f"{origin}: {lines[0]}")
    listed = lines[:MOST_LINES]
    if len(lines) > MOST_LINES:
        listed.append(f"and {len(lines) - MOST_LINES} more")
    raise ConfigError(
        f"{origin} has {len(lines)} problems:\n"
        + "\n".join(f"  {line}" for line in listed)
    )


def _find(path: Path) -> Path:
    try:
        if path.exists():
            return path
    except OSError as error:  # for example the text of a file in place of its path
        raise ConfigError(
            f"{shown(str(path))} is no path of a file: {error.strerror}."
        ) from None
    folder = Path(str(resources.files("infini_llama.configs")))
    packaged = folder / (path.name if path.suffix else f"{path.name}.yaml")
    if (
        path.parent in (Path(), Path("configs"))
        and packaged.is_file()
        and packaged.suffix == ".yaml"
    ):
        return packaged
    names = ", ".join(sorted(file.name for file in folder.glob("*.yaml")))
    raise ConfigError(
        f"{path} does not exist (looked from {Path.cwd()}); give the path of a file, or one of "
        f"{names}."
    )


def _override(mapping: JsonObject, override: str, problems: list[str]) -> JsonObject:
    """The mapping with one `dotted.key=value` set.

    Args:
        problems: gets a line for what is wrong with the override itself.
    """
    key, equals, text = override.partition("=")
    steps = tuple(key.strip().split("."))
    if not equals or not all(steps):
        problems.append(
            f"{shown(override)}: expected key=value, for example train.max_steps=100"
        )
        return mapping
    _, _, allowed = place(steps)
    _, _, allowed_above = place(steps[:-1])
    if get_origin(allowed) is dict and get_origin(allowed_above) is not dict:
        problems.append(
            f"{key.strip()}: name one variable, for example {key.strip()}.NAME=value"
        )
        return mapping
    try:
        value = _text(text, allowed) if _holds_text(allowed) else parse_yaml(text)
    except ValueError as error:
        problems.append(
            f"{key.strip()}: the value {shown(text)} is not valid YAML ({error}); put it in quotes"
        )
        return mapping
    try:
        return _with(mapping, steps, value)
    except ValueError as error:
        problems.append(f"{key.strip()}: {error}")
        return mapping


def _with(mapping: JsonObject, steps: tuple[str, ...], value: JsonValue) -> JsonObject:
    """A copy with this value; two keys of a YAML file may share one object through an alias.

    Raises:
        ValueError: a key above it holds no section.
    """
    first, *rest = steps
    if rest:
        below = mapping.get(first)
        if below is not None and not isinstance(below, dict):
            raise ValueError(
                f"{first} holds a value of its own, so nothing can be set below it"
            )
        value = _with(below or {}, tuple(rest), value)
    return {**mapping, first: value}


def _holds_text(allowed: Any) -> bool:
    """Whether every value that is allowed is text, or null."""
    origin = get_origin(allowed)
    arguments = get_args(allowed)
    if origin is Annotated:
        return _holds_text(arguments[0])
    if origin in (Union, types.UnionType):
        return all(
            _holds_text(argument)
            for argument in arguments
            if argument is not type(None)
        )
    if origin is Literal:
        return all(isinstance(choice, str) for choice in arguments)
    return allowed in (str, Path)


def _may_be_null(allowed: Any) -> bool:
    arguments = get_args(allowed)
    if get_origin(allowed) is Annotated:
        return _may_be_null(arguments[0])
    return type(None) in arguments


def _text(text: str, allowed: Any) -> str | None:
    """The text that was written, without the quotes if it was quoted as YAML.

    Returns:
        None for null, where that is allowed.
    """
    if text.strip() in NULLS and _may_be_null(allowed):
        return None
    if text[:1] in ("'", '"') and len(text) > 1 and text[-1] == text[0]:
        value = parse_yaml(text)
        if isinstance(value, str):
            return value
    return text
