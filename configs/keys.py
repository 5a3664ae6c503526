"""Every key and the values that it accepts, in words. All of it is derived from the schema."""

import functools
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infini_llama.configs.durations import COUNT, DURATION
from infini_llama.configs.schema import RUN_NAME, PipelineConfig
from infini_llama.configs.schema.deployment import FIVE_FIELDS, SLUG
from infini_llama.configs.schema.environment import HOST, SRUN_OPTION
from infini_llama.configs.schema.sources import SOURCE_NAME

# Patterns of the schema in words.
PATTERNS = {
    RUN_NAME: (
        "a name of at most 100 letters, digits, '.', '_', '-', {date} and {time} that begins with "
        "a letter or digit"
    ),
    SOURCE_NAME: (
        "a name of at most 100 letters, digits, '.', '_' and '-' that begins with a letter or digit"
    ),
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


def section_of(annotation: Any, or_null: bool = False) -> type[BaseModel] | None:
    """The section that a key holds, None for a key with a value.

    Args:
        or_null: also a section in whose place the key may be null.
    """
    if or_null and get_origin(annotation) is types.UnionType:
        choices = [
            argument for argument in get_args(annotation) if argument is not type(None)
        ]
        return section_of(choices[0]) if len(choices) == 1 else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


@functools.cache
def all_keys(
    section: type[BaseModel] = PipelineConfig, prefix: str = ""
) -> dict[str, bool]:
    """Every dotted key; True for a section."""
    keys: dict[str, bool] = {}
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        keys[prefix + name] = below is not None
        if below:
            keys |= all_keys(below, f"{prefix}{name}.")
    return keys


def place(location: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[str, ...], Any]:
    """The key that an error's location leads to.

    Returns:
        the steps that the user wrote; those of the key to blame, which is the whole list for an
        entry of it, and the whole section for a key of one that may be null; and the type of what
        is allowed there, None for an unknown key.
    """
    steps: list[Any] = []
    key: list[str] = []
    is_key = True
    allowed: Any = PipelineConfig
    for step in location:
        if isinstance(step, int):
            allowed = _list_among(allowed)
        elif step.startswith("list[") and get_origin(_list_among(allowed)) is list:
            continue  # pydantic's name for the list among the choices of a union
        section = section_of(allowed, or_null=True)
        arguments = get_args(allowed)
        if section is not None:
            is_key = is_key and section is allowed
            if step not in section.model_fields:
                return (*steps, step), tuple(key), None
            field = section.model_fields[step]
            allowed = (
                Annotated[field.annotation, field]
                if field.metadata
                else field.annotation
            )
            if is_key:
                key.append(step)
        elif get_origin(allowed) is list:
            is_key = False
            allowed = arguments[0]
        elif get_origin(allowed) is dict:
            is_key = False
            key_type, value_type = arguments
            allowed = key_type if location[-1] == "[key]" else value_type
        else:
            break  # pydantic's name for one branch of a union, or its mark "[key]"
        steps.append(step)
    return tuple(steps), tuple(key), allowed


def _list_among(allowed: Any) -> Any:
    """The list in whose place a key may also hold null or some words; otherwise `allowed`."""
    origin = get_origin(allowed)
    choices = get_args(allowed)
    if origin is Annotated:
        return _list_among(choices[0])
    if origin not in (Union, types.UnionType):
        return allowed
    lists = [choice for choice in choices if get_origin(choice) is list]
    for choice in choices:
        is_plain = choice is type(None) or get_origin(choice) is Literal
        if not is_plain and choice not in lists:
            return allowed
    return lists[0] if len(lists) == 1 else allowed


def words(allowed: Any, rules: tuple[Any, ...] = ()) -> str:
    """The values that a type allows, in words such as 'an integer ≥ 1 or auto'."""
    origin = get_origin(allowed)
    arguments = get_args(allowed)
    if origin is Annotated:
        groups = [
            rule.metadata if isinstance(rule, FieldInfo) else [rule]
            for rule in arguments[1:]
        ]
        return words(arguments[0], tuple(rule for group in groups for rule in group))
    if origin in (Union, types.UnionType):
        return " or ".join(words(argument, rules) for argument in arguments)
    choices = arguments if origin is Literal else _rule(rules, "names")
    if choices:
        is_one = len(choices) == 1
        return str(choices[0]) if is_one else "one of " + ", ".join(map(str, choices))
    if origin is list:
        if section_of(arguments[0]):
            return "a list of sections"
        article = "a non-empty" if _rule(rules, "min_length") else "a"
        return f"{article} list such as [a, b]"
    if section_of(allowed):
        return "a section with keys"
    if origin is dict:
        return "a mapping of keys to values"
    if allowed is str:
        pattern = _rule(rules, "pattern")
        if pattern:
            return PATTERNS[pattern]
        return "a non-empty string" if _rule(rules, "min_length") else "a string"
    kind = PLAIN[allowed]
    if _rule(rules, "multiple_of") == 2:
        kind = "an even integer"
    return kind + _range(rules)


PLAIN = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    type(None): "null",
}


def _rule(rules: tuple[Any, ...], name: str) -> Any:
    """The limit of this name in the first rule that has one."""
    limits = (getattr(rule, name, None) for rule in rules)
    return next((limit for limit in limits if limit is not None), None)


def _range(rules: tuple[Any, ...]) -> str:
    low, above, high, below = (_rule(rules, name) for name in ("ge", "gt", "le", "lt"))
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = {"≥": low, ">": above, "≤": high, "<": below}
    limits = [(text, bound) for text, bound in bounds.items() if bound is not None]
    return "".join(
        f"{' and' if i else ''} {text} {'2^63' if bound == 2**63 else bound}"
        for i, (text, bound) in enumerate(limits)
    )
