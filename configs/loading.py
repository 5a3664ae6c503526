"""A YAML or JSON file and `key=value` overrides become a PipelineConfig, or one ConfigError that lists every problem."""

import difflib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from configs.errors import ConfigError
from configs.schema import PipelineConfig


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """The run that `path` describes, with dotted `key=value` overrides on top; the run is named after the file unless it names itself.

    A path that does not exist here but names a configuration that comes with the program (`configs/tiny.yaml`, `tiny.yaml`) is that one.

    Raises:
        ConfigError: every problem, a line each.
    """
    file = _find(Path(path))
    mapping = _read(file)
    problems = [problem for override in overrides if (problem := _apply(mapping, override))]
    if isinstance(runtime := mapping.setdefault("runtime", {}), dict):
        runtime.setdefault("name", file.stem)
    return _validate(mapping, problems, f"{path}")


def parse_config(mapping: dict[str, Any]) -> PipelineConfig:
    """The same from a plain dict.

    Raises:
        ConfigError: every problem, a line each.
    """
    return _validate(mapping, [], "the configuration")


def _find(path: Path) -> Path:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a YAML or JSON file.")
    if path.exists():
        return path
    packaged = Path(str(resources.files("configs").joinpath(path.name)))
    if path.parent in (Path(), Path("configs")) and path.suffix in (".yaml", ".yml", ".json") and packaged.is_file():
        return packaged
    known = sorted(file.name for file in packaged.parent.glob("*.yaml"))
    raise ConfigError(
        f"configuration {path} does not exist (looked from {Path.cwd()}); ready ones are {', '.join(known)}."
    )


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key may stand once."""


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        try:
            repeated = key in seen
        except TypeError:
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a plain word", key_node.start_mark
            ) from None
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' stands twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def _parse_yaml(text: str) -> Any:
    loader = _StrictLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8 text.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    try:
        content = json.loads(text) if file.suffix == ".json" else _parse_yaml(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{file}, line {mark.line + 1 if mark else '?'}: {error.problem or error.context}.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}.") from None
    if content is None:
        raise ConfigError(f"{file} is empty; it needs sections such as data, model and train.")
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {_kind(content)}, not sections such as data, model and train.")
    return content


def _apply(mapping: dict[str, Any], override: str) -> str | None:
    """Sets one `dotted.key=value` in place; returns what is wrong with it, if anything."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return f"'{override}' is no override; write section.key=value, for example train.max_steps=100."
    try:
        value = _parse_yaml(text)
    except yaml.YAMLError:
        return f"{key}: the value '{text}' is not valid YAML; quote it."
    target = mapping
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return f"{key}: '{part}' is a value, not a section."
    target[parts[-1]] = value
    return None


def _validate(mapping: dict[str, Any], problems: list[str], origin: str) -> PipelineConfig:
    try:
        config = PipelineConfig.model_validate(mapping)
    except ValidationError as errors:
        # A rule between keys is only tried once every key of its section is right, so it cannot hide another problem.
        problems = problems + [_sentence(error) for error in errors.errors(include_url=False)]
    else:
        if not problems:
            return config
    lines = _merge_alternatives(problems)
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    raise ConfigError(f"{origin} has {count}:\n" + "\n".join(f"  {line}" for line in lines))


# What pydantic calls the ways of being wrong, in plain words; {…} are filled from its context.
SENTENCES = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text (quote it if it looks like a number)",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_short": "must not be empty",
    "literal_error": "must be one of {expected}",
    "list_type": "must be a list, for example [a, b]",
    "dict_type": "must be a section of key: value lines",
    "model_type": "must be a section of key: value lines",
    "model_attributes_type": "must be a section of key: value lines",
    "path_type": "must be a path",
    "byte_size": "must be a size such as 256MiB",
    "byte_size_unit": "must be a size such as 256MiB",
}


ALSO = ": may also be "


def _sentence(error: Any) -> str:
    # A union's branches (int | "auto", int | null) end the location with a name of pydantic's own.
    location = [str(part) for part in error["loc"] if _is_key(str(part))]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        nearest = _nearest(key)
        hint = f"; did you mean {nearest}?" if nearest else f"; known here: {', '.join(_children(location[:-1]))}."
        return f"{key}: unknown key{hint}"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return f"{key}: {text}" if key else text
    text = str(SENTENCES.get(error["type"], error["msg"]))
    if error["type"] == "literal_error" and location and str(error["loc"][-1]) != location[-1]:
        text = ALSO.removeprefix(": ") + "{expected}"
    return f"{key}: {text.format(**error.get('ctx', {}))}, not {_shown(error['input'])}"


def _merge_alternatives(problems: list[str]) -> list[str]:
    """One line for a key that fails both as a number and as a word: '…: must be at least 1, or 'auto', not 0'."""
    lines: list[str] = []
    for problem in dict.fromkeys(problems):
        key, also, rest = problem.partition(ALSO)
        if also and lines and lines[-1].startswith(key):
            lines[-1] = lines[-1].removesuffix(rest[rest.index(", not ") :]) + f", or {rest}"
        else:
            lines.append(problem)
    return lines


def _is_key(part: str) -> bool:
    return not any(mark in part for mark in ("[", "(", "-", " ")) and part not in ("int", "float", "str")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def _kind(value: Any) -> str:
    return {
        "list": "list",
        "str": "single word or sentence",
        "int": "number",
        "float": "number",
        "bool": "true or false",
    }.get(type(value).__name__, type(value).__name__)


def _section(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is None and isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys(section: type[BaseModel] = PipelineConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the configuration."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if below := _section(field.annotation):
            keys += _all_keys(below, f"{prefix}{name}.")
    return keys


def _children(location: list[str]) -> list[str]:
    prefix = "".join(f"{part}." for part in location)
    return [key for key in _all_keys() if key.startswith(prefix) and "." not in key[len(prefix) :]]


def _nearest(key: str) -> str | None:
    """The known key that resembles `key` most: by its whole name, or by its last word in another section."""
    known = _all_keys()
    if whole := difflib.get_close_matches(key, known, n=1, cutoff=0.75):
        return whole[0]
    by_word = {name.rsplit(".", 1)[-1]: name for name in known}
    close = difflib.get_close_matches(key.rsplit(".", 1)[-1], by_word, n=1, cutoff=0.75)
    return by_word[close[0]] if close else None
