"""Describes the values that each key accepts, and finds the known key that a wrong name resembles. All of it is derived from the schema."""

import difflib
import functools
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from infini_llama.configs import other_names
from infini_llama.configs.durations import COUNT, DURATION
from infini_llama.configs.schema import RUN_NAME, PipelineConfig
from infini_llama.configs.schema.deployment import FIVE_FIELDS, SLUG
from infini_llama.configs.schema.environment import HOST, SRUN_OPTION
from infini_llama.configs.schema.sources import SOURCE_NAME

# Patterns of the schema in words.
PATTERNS = {
    RUN_NAME: "a name of at most 100 letters, digits, '.', '_', '-', {date} and {time} that begins with a letter or digit",
    SOURCE_NAME: "a name of at most 100 letters, digits, '.', '_' and '-' that begins with a letter or digit",
    SLUG: "a name of lowercase letters, digits and '-'",
    FIVE_FIELDS: "a cron expression: minute, hour, day of month, month, day of week",
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:K",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "a variable's name (letters, digits and '_', no digit first)",
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "a function, written module:function",
    DURATION: "an interval such as '10M tokens' or '15 minutes'",
    HOST: "a host name, an IPv4 address or auto",
    SRUN_OPTION: "an srun option, written --name or --name=value",
    COUNT: "a number such as 300M (k, M, G or T)",
}
SIMILAR = 0.75  # of difflib, from 0 to 1: typing errors, not words that share letters


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, None for a key with a value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


@functools.cache
def all_keys(section: type[BaseModel] = PipelineConfig, prefix: str = "") -> dict[str, bool]:
    """Every dotted key; True for a section."""
    keys: dict[str, bool] = {}
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        keys[prefix + name] = below is not None
        if below:
            keys |= all_keys(below, f"{prefix}{name}.")
    return keys


def place(location: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[str, ...], Any]:
    """Where an error's location leads: the steps that are the user's own, those that are keys, and what is allowed there."""
    steps: list[Any] = []
    fields: list[str] = []
    allowed: Any = PipelineConfig
    for step in location:
        below, arguments = section_of(allowed), get_args(allowed)
        if below is not None:
            if step not in below.model_fields:
                return (*steps, step), tuple(fields), None
            field = below.model_fields[step]
            allowed = Annotated[field.annotation, field] if field.metadata else field.annotation  # type: ignore[valid-type]
            if not any(
                isinstance(earlier, int) for earlier in steps
            ):  # what is wrong with an entry is wrong with its list
                fields.append(step)
        elif get_origin(allowed) is list:
            allowed = arguments[0]
        elif get_origin(allowed) is dict:
            allowed = arguments[0 if location[-1] == "[key]" else 1]
        else:
            break  # pydantic's name for one branch of a union, or its mark "[key]"
        steps.append(step)
    return tuple(steps), tuple(fields), allowed


def words(allowed: Any, rules: tuple[Any, ...] = ()) -> str:
    """'an integer ≥ 1 or auto' for such a type."""
    origin, arguments = get_origin(allowed), get_args(allowed)
    if origin is Annotated:
        given = [rule.metadata if isinstance(rule, FieldInfo) else [rule] for rule in arguments[1:]]
        return words(arguments[0], tuple(rule for several in given for rule in several))
    if origin in (Union, types.UnionType):
        return " or ".join(words(argument) for argument in arguments)
    if origin is Literal:
        return str(arguments[0]) if len(arguments) == 1 else "one of " + ", ".join(map(str, arguments))
    if origin is list:
        return "a list of sections" if section_of(arguments[0]) else "a list such as [a, b]"
    if origin is dict or section_of(allowed):
        return "a section with keys" if section_of(allowed) else "a mapping of keys to values"
    if allowed is str:
        pattern = _rule(rules, "pattern")
        return PATTERNS[pattern] if pattern else "a non-empty string" if _rule(rules, "min_length") else "a string"
    if allowed is ByteSize and rules:
        return f"{PLAIN[allowed]},{_range(rules)} bytes"
    return PLAIN[allowed] + _range(rules)


PLAIN = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    ByteSize: "a size such as 256MiB",
    Path: "a path",
    type(None): "null",
}


def _rule(rules: tuple[Any, ...], name: str) -> Any:
    return next((value for rule in rules if (value := getattr(rule, name, None)) is not None), None)


def _range(rules: tuple[Any, ...]) -> str:
    low, above, high, below = (_rule(rules, name) for name in ("ge", "gt", "le", "lt"))
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = {"≥": low, ">": above, "≤": high, "<": below}
    return "".join(
        f"{' and' if i else ''} {text} {'2^63' if bound == 2**63 else bound}"
        for i, (text, bound) in enumerate((t, b) for t, b in bounds.items() if b is not None)
    )


def nearest(steps: tuple[str, ...], is_section: bool = False) -> tuple[str, ...]:
    """The known keys that a wrong one most likely means: those for another program's name, or the one of the most similar name."""
    steps = tuple(step.lower().replace("-", "_") for step in steps)
    for name in (".".join(steps), steps[-1]):
        if name in other_names.KEYS:
            return tuple(other_names.KEYS[name].split(" or "))
    parent, word = ".".join(steps[:-1]), difflib.SequenceMatcher(b=steps[-1])
    scored: list[tuple[float, int, str]] = []
    for key, holds_section in all_keys().items():
        above, _, name = key.rpartition(".")
        word.set_seq1(name)
        if holds_section == is_section and word.quick_ratio() >= SIMILAR and (ratio := word.ratio()) >= SIMILAR:
            scored.append((ratio + 0.2 * (above == parent), -key.count("."), key))
    return (max(scored)[2],) if scored else ()
