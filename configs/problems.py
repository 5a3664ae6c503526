"""Reports every problem of a configuration at once.

Each message names the key, its value and what is allowed.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from infini_llama.configs import other_names
from infini_llama.configs.keys import all_keys, place, section_of, words
from infini_llama.configs.schema import PipelineConfig

Settings = dict[str, Any]
Steps = tuple[Any, ...]  # keys, and numbers of entries of lists


def _is_mapping(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def validate(mapping: dict[Any, Any]) -> tuple[PipelineConfig | None, list[str]]:
    """The configuration, None unless it is right, and the list of problems.

    A rule between keys is only tried by pydantic once each of them is right by itself. So that no
    problem hides another, what is wrong is taken out and the rest is validated again; a rule about
    a key that was taken out is not reported.
    """
    rest: Settings = _with_empty_sections(_with_text_keys(mapping), PipelineConfig)
    lines: list[str] = []
    wrong: set[str] = set()
    meant: set[str] = set()  # what an unknown key probably meant to set
    unknown = [error for error in _errors(rest) if error["type"] == "extra_forbidden"]
    for error in unknown:
        hint, keys = _hint(error["loc"], error["input"])
        lines.append(f"{_dotted(error['loc'])}: unknown key; {hint}")
        meant |= keys
        rest = _without(rest, error["loc"])
    for steps in list(_with_nul(rest)):
        lines.append(f"{_dotted(steps)}: the value contains a NUL character; remove it")
        _, key_steps, _ = place(steps)
        wrong.add(".".join(key_steps))
        rest = _without(rest, key_steps)
    while errors := _errors(rest):
        named: set[str] = set()
        # A union fails once per branch, and its list may have failed at an entry before.
        reported: set[Steps] = set()
        for error in errors:
            steps, fields, _ = place(error["loc"])
            if error["type"] == "value_error":
                for keys, rule in _rules(error, fields):
                    if not _any_within(keys, wrong | meant):
                        lines.append(rule)
                    named |= keys
                continue
            key = ".".join(fields)
            is_reported = any(other[: len(steps)] == steps for other in reported)
            if not is_reported and not _any_within({key}, wrong):
                lines.append(_sentence(error))
            reported.add(steps)
            named.add(key)
        if named <= wrong:
            break
        wrong |= named
        for name in named:
            rest = _without(rest, tuple(name.split(".")))
    config = None if lines else PipelineConfig.model_validate(rest)
    return config, lines


def _errors(settings: Settings) -> list[ErrorDetails]:
    try:
        PipelineConfig.model_validate(settings)
    except ValidationError as errors:
        return errors.errors(include_url=False)
    return []


def _with_text_keys(value: Any) -> Any:
    """A copy of the value with each key as text, as it would be shown."""
    if _is_mapping(value):
        return {_text_key(key): _with_text_keys(below) for key, below in value.items()}
    return [_with_text_keys(entry) for entry in value] if is_list(value) else value


def _text_key(key: object) -> str:
    is_text = isinstance(key, str) and not re.search("[\ud800-\udfff]", key)
    return str(key) if is_text else shown(key)


def _with_empty_sections(settings: Settings, section: type[BaseModel]) -> Settings:
    """`train:` with nothing below it is a section without keys."""
    result = dict(settings)
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below and name in result:
            value: Any = {} if result[name] is None else result[name]
            result[name] = (
                _with_empty_sections(value, below) if _is_mapping(value) else value
            )
    return result


def _hint(steps: Steps, value: Any) -> tuple[str, set[str]]:
    """Advice about an unknown key, and the keys that were probably meant."""
    is_in_list = any(isinstance(step, int) for step in steps)
    decided = other_names.DECIDED.get(".".join(map(str, steps)))
    if decided is not None:
        return f"leave it out: {decided}", set()
    if not is_in_list:
        dotted = ".".join(steps)
        if dotted in all_keys():
            *parents, last = dotted.split(".")
            return f"in a file write it as '{last}' below '{' and '.join(parents)}'", {
                dotted
            }
        similar = other_names.nearest(steps, _is_mapping(value))
        if similar:
            return f"did you mean {' or '.join(similar)}?", set(similar)
    _, _, allowed = place(steps[:-1])
    section = section_of(allowed, or_null=True) or PipelineConfig
    return f"known keys here: {', '.join(section.model_fields)}", set()


def _with_nul(value: Any, steps: Steps = ()) -> Iterator[Steps]:
    """The place of each text or key with a NUL character, which no path or variable can hold."""
    if isinstance(value, str) and "\0" in value:
        yield steps
    entries: Iterable[tuple[Any, Any]] = ()
    if _is_mapping(value):
        entries = value.items()
    elif is_list(value):
        entries = enumerate(value)
    for key, below in entries:
        yield from _with_nul(below, (*steps, key))
        if isinstance(key, str) and "\0" in key:
            yield (*steps, key)


def _sentence(error: ErrorDetails) -> str:
    """A sentence with the wrong value of a key and what is allowed there."""
    steps, _, allowed = place(error["loc"])
    value = error["input"]
    key = _dotted(steps)
    if value is None or error["type"] == "missing":
        return f"{key}: it has no value; set it to {words(allowed)}"
    expected = words(allowed)
    if isinstance(value, float) and not isfinite(value):
        expected = expected.replace("a ", "a finite ", 1)
    is_secret = steps[:2] == ("environment", "env") and error["loc"][-1] != "[key]"
    line = f"{key}: {'the value' if is_secret else shown(value)} is not {expected}"
    if error["type"] == "string_type" and isinstance(value, int | float):
        line += "; put it in quotes"
    return line


def reasons_of(error: ErrorDetails) -> tuple[str, ...]:
    """The sentences of a validator of the schema that failed; pydantic's own for another error."""
    if error["type"] == "value_error" and "ctx" in error:
        return error["ctx"]["error"].args
    return (error["msg"],)


def _rules(
    error: ErrorDetails, fields: tuple[str, ...]
) -> Iterator[tuple[set[str], str]]:
    """Failed rules between keys.

    Yields:
        the keys that a rule names, and its sentence with their dotted names.
    """
    section = _dotted(error["loc"])
    every_key = all_keys()
    of_section = [
        key.removeprefix(f"{section}.")
        for key in every_key
        if key.startswith(f"{section}.")
    ]
    for rule in reasons_of(error):
        if of_section:
            rule = re.sub(
                rf"(?<![\w.])({'|'.join(map(re.escape, of_section))})(?==)",
                rf"{section}.\1",
                rule,
            )
        named = {
            name
            for name in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", rule)
            if name in every_key
        }
        if section and not named:
            rule = f"{section}: {rule}"
        yield named or {".".join(fields)}, rule


def _any_within(names: set[str], wrong: set[str]) -> bool:
    return any(
        name == bad or name.startswith(f"{bad}.") for name in names for bad in wrong
    )


def _without(settings: Any, steps: Steps) -> Any:
    """A copy without the key, or entry of a list, at the end of `steps`."""
    first, *rest = steps
    if not (is_list(settings) or (_is_mapping(settings) and first in settings)):
        return settings
    copy = settings.copy()
    if rest:
        copy[first] = _without(copy[first], tuple(rest))
    else:
        del copy[first]
    return copy


def _dotted(steps: Steps) -> str:
    return ".".join(
        step
        if isinstance(step, str) and re.fullmatch(r"[\w.-]{1,80}", step)
        else shown(step)
        for step in steps
    )


_bounded = reprlib.Repr()
_bounded.maxlevel = 2
_bounded.maxlist = 4
_bounded.maxdict = 4
_bounded.maxstring = 60
_bounded.maxother = 60


def shown(value: Any) -> str:
    """A value as the user wrote it, short and on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Path):
        return repr(str(value))
    try:
        return " ".join(_bounded.repr(value).split("\n"))
    except ValueError:  # Python refuses to print thousands of digits
        return "a number of thousands of digits"
