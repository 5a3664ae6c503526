"""Environment variables in the paths of a configuration: $NAME, ${NAME}, and $$ for a dollar.

They are those of the machine that executes the run. URLs stay as they are: records and Prefect's
server store them, and a variable may be a token.
"""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.problems import is_list, shown
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.schema.section import Section, has_paths

VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[^}]*)\})"
)
AnySection = TypeVar("AnySection", bound=Section)


def without_variables(config: PipelineConfig) -> PipelineConfig:
    """The configuration with the values of the variables that its paths name.

    It is done once per run: a value is not searched for variables again.

    Raises:
        ConfigError: a variable does not exist, is empty, or holds a URL.
    """
    filled = _in_section(config, "")
    for place, kind in config.data.not_text.items():
        filled.data.leave_out(place, kind)
    if filled.storage.mirror is not None:
        filled.data.leave_out(filled.storage.mirror, "storage.mirror")
    return filled


def as_written(path: object) -> str:
    """A path as a configuration names it, in which a dollar sign would begin a variable."""
    text = str(path)
    return text if "://" in text else text.replace("$", "$$")


def _in_section(section: AnySection, prefix: str) -> AnySection:
    changes: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = prefix + name
        if isinstance(value, Section):
            filled = _in_section(value, f"{key}.")
        elif is_list(value) and value and isinstance(value[0], Section):
            filled = [
                _in_section(entry, f"{key}.{place}.")
                for place, entry in enumerate(value)
            ]
        elif has_paths(field) and name in section.model_fields_set:
            filled = _filled(value, key)
        else:
            continue
        if filled != value:
            changes[name] = filled
    return changed(section, **changes) if changes else section


def _filled(value: Any, key: str) -> Any:
    if isinstance(value, Path):
        return Path(_filled_path(str(value), key))
    if is_list(value):
        return [_filled(entry, key) for entry in value]
    return _filled_path(value, key) if isinstance(value, str) else value


def _filled_path(path: str, key: str) -> str:
    if "://" in path:
        return path

    def value_of(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        name = match["name"] or match["braced"]
        value = os.environ.get(name)
        if not value:
            raise ConfigError(
                f"{key}={shown(path)}: the environment variable {name} does not exist here, or is "
                "empty; set it where the run is executed, or write $$ for a dollar sign."
            )
        return value

    filled = VARIABLE.sub(value_of, path)
    if "://" in filled:
        raise ConfigError(
            f"{key}={shown(path)}: the variable has a URL, which records would store; write the "
            "URL itself, without a password or a token."
        )
    return filled
