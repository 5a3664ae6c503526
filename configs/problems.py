"""Reports every problem of a configuration at once; each message names the key, its value and what is allowed."""

import re
import reprlib
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ByteSize, ValidationError
from pydantic_core import ErrorDetails

from infini_llama.configs import other_names
from infini_llama.configs.keys import all_keys, nearest, place, section_of, words
from infini_llama.configs.schema import PipelineConfig

NUMBERS = (int, float, ByteSize)
Settings = dict[Any, Any]  # as a file or a caller gives them: a key may be anything


def _is_mapping(value: object) -> TypeGuard[Settings]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


class _Fault(NamedTuple):
    """What pydantic says of one value."""

    kind: str
    location: tuple[int | str, ...]
    value: Any
    message: str

    @classmethod
    def of(cls, error: ErrorDetails) -> "_Fault":
        return cls(error["type"], error["loc"], error["input"], error["msg"])


def validate(mapping: Settings) -> tuple[PipelineConfig | None, list[str]]:
    """The configuration (None unless all is right) and the list of problems.

    A rule between keys is only tried by pydantic once each of them is right by itself. So that no problem hides another, what is
    wrong is taken out and the rest is validated again; a rule about a key that was taken out is not reported.
    """
    lines: list[str] = []
    wrong: set[str] = set()
    doubtful: set[str] = set()  # what an unknown key probably meant to set
    rest = _with_empty_sections(mapping, PipelineConfig)
    for steps, fields, line, meant in [*_unknown_keys(rest), *_lax_values(rest, PipelineConfig, ())]:
        lines.append(line)
        wrong |= {".".join(fields)} if fields else set()
        doubtful |= meant
        rest = _without(rest, steps)
    while True:
        try:
            config = PipelineConfig.model_validate(rest)
        except ValidationError as errors:
            named: set[str] = set()
            reported: set[tuple[Any, ...]] = set()  # a union fails once per branch
            for error in map(_Fault.of, errors.errors(include_url=False)):
                if error.kind == "value_error":
                    for keys, rule in _rules(error):
                        lines += [] if _any_within(keys, wrong | doubtful) else [rule]
                        named |= keys
                    continue
                steps, fields, _ = place(error.location)
                if steps not in reported and not _any_within({".".join(fields)}, wrong):
                    lines.append(_sentence(error))
                reported.add(steps)
                named.add(".".join(fields))
            if named <= wrong:
                return None, lines
            wrong |= named
            for name in named:
                rest = _without(rest, tuple(name.split(".")))
        else:
            return config, lines


def _with_empty_sections(mapping: Settings, section: type[BaseModel]) -> Settings:
    """`train:` with nothing below it is a section without keys."""
    result = dict(mapping)
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below and name in result:
            value: Any = {} if result[name] is None else result[name]
            result[name] = _with_empty_sections(value, below) if _is_mapping(value) else value
    return result


Problem = tuple[tuple[Any, ...], tuple[str, ...], str, set[str]]


def _unknown_keys(
    mapping: Settings, section: type[BaseModel] = PipelineConfig, above: tuple[Any, ...] = ()
) -> Iterator[Problem]:
    for key, value in mapping.items():
        steps = (*above, key)
        field = section.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            hint, meant = _hint(steps, value, section)
            yield steps, (), f"{_dotted(steps)}: unknown key; {hint}", meant
        elif (below := section_of(field.annotation) or _section_or_null(field.annotation)) and _is_mapping(value):
            yield from _unknown_keys(value, below, steps)
        elif (below := _sections_in(field.annotation)) and _is_list(value):
            for number, entry in enumerate(value):
                if _is_mapping(entry):
                    yield from _unknown_keys(entry, below, (*steps, number))


def _section_or_null(annotation: Any) -> type[BaseModel] | None:
    """The section of a key that may also be null, None for a key of another kind."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return section_of(kinds[0]) if len(kinds) == 1 and get_origin(annotation) is UnionType else None


def _sections_in(annotation: Any) -> type[BaseModel] | None:
    """The section that each entry of a list is, None for a key of another kind."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


def _hint(steps: tuple[Any, ...], value: Any, section: type[BaseModel]) -> tuple[str, set[str]]:
    key = steps[-1]
    if (gone := other_names.DECIDED.get(".".join(map(str, steps)))) is not None:
        return f"leave it out: {gone}", set()
    if isinstance(key, str) and ".".join(map(str, steps)) in all_keys():
        *parents, last = ".".join(steps).split(".")
        return f"in a file write it as '{last}' below '{' and '.join(parents)}'", {".".join(steps)}
    in_list = any(isinstance(step, int) for step in steps[:-1])
    if isinstance(key, str) and not in_list and (meant := nearest(steps, _is_mapping(value))):
        return f"did you mean {' or '.join(meant)}?", set(meant)
    return f"known keys here: {', '.join(section.model_fields)}", set()


def _lax_values(mapping: Settings, section: type[BaseModel], above: tuple[Any, ...]) -> Iterator[Problem]:
    """What pydantic would let pass: true as the number 1, and NUL characters, which no path or variable can hold."""
    for name, value in mapping.items():
        field = section.model_fields.get(name) if isinstance(name, str) else None
        if field is None:
            continue
        steps = (*above, name)
        below = section_of(field.annotation)
        if below and _is_mapping(value):
            yield from _lax_values(value, below, steps)
        elif (below := _sections_in(field.annotation)) and _is_list(value):
            for number, entry in enumerate(value):
                yield from _lax_values(entry, below, (*steps, number)) if _is_mapping(entry) else ()
        elif isinstance(value, bool) and _is_number(field.annotation):
            _, fields, allowed = place(steps)
            yield steps, fields, f"{_dotted(steps)}: {shown(value)} is not {words(allowed)}", set()
        else:
            for inner in _with_nul(value, steps):
                yield steps, place(steps)[1], f"{_dotted(inner)}: the value contains a NUL character; remove it", set()


def _with_nul(value: Any, steps: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Where a NUL character is: in a text, or in an entry of a list or a table."""
    entries = value.items() if _is_mapping(value) else enumerate(value) if _is_list(value) else ()
    if isinstance(value, str) and "\0" in value:
        yield steps
    for key, entry in entries:
        if any(isinstance(text, str) and "\0" in text for text in (key, entry)):
            yield (*steps, key)


def _is_number(allowed: Any) -> bool:
    if get_origin(allowed) is Annotated:
        return _is_number(get_args(allowed)[0])
    return allowed in NUMBERS or any(_is_number(argument) for argument in get_args(allowed))


def _sentence(error: _Fault) -> str:
    steps, _, allowed = place(error.location)
    value, key = error.value, _dotted(steps)
    if error.kind == "extra_forbidden":
        return f"{key}: unknown key; remove it"
    if value is None or error.kind == "missing":
        return f"{key}: it has no value; set it to {words(allowed)}"
    expected = words(allowed)
    if isinstance(value, float) and not isfinite(value):
        expected = expected.replace("a ", "a finite ", 1)
    is_secret = steps[:2] == ("environment", "env") and error.location[-1] != "[key]"
    line = f"{key}: {'the value' if is_secret else shown(value)} is not {expected}"
    if error.kind == "string_type" and isinstance(value, int | float):
        line += "; put it in quotes"
    return line


def _rules(error: _Fault) -> Iterator[tuple[set[str], str]]:
    """Each failed rule between keys: the keys that it names, and its sentence with their dotted names."""
    section, (_, fields, _) = _dotted(error.location), place(error.location)
    text = error.message.removeprefix("Value error, ")
    known = all_keys()
    if own := [key.removeprefix(f"{section}.") for key in known if key.startswith(f"{section}.")]:
        text = re.sub(rf"(?<![\w.])({'|'.join(map(re.escape, own))})(?==)", rf"{section}.\1", text)
    # The schema joins the rules between sections by semicolons, and each begins with its key.
    for rule in re.split(rf"; (?=(?:{'|'.join(PipelineConfig.model_fields)})\.)", text):
        named = {name for name in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", rule) if name in known}
        yield named or {".".join(fields)}, rule if named or not section else f"{section}: {rule}"


def _any_within(names: set[str], wrong: set[str]) -> bool:
    return any(name == bad or name.startswith(f"{bad}.") for name in names for bad in wrong)


def _without(mapping: Any, steps: tuple[Any, ...]) -> Any:
    first, *rest = steps
    if _is_list(mapping):
        entries = [_without(entry, tuple(rest)) if number == first else entry for number, entry in enumerate(mapping)]
        return entries if rest else mapping[:first] + mapping[first + 1 :]
    if first not in mapping:
        return mapping
    if not rest:
        return {key: value for key, value in mapping.items() if not (key is first or key == first)}  # NaN is not itself
    below = mapping[first]
    return mapping | {first: _without(below, tuple(rest))} if _is_mapping(below) or _is_list(below) else mapping


def _dotted(steps: tuple[Any, ...]) -> str:
    return ".".join(
        step if isinstance(step, str) and re.fullmatch(r"[\w.-]{1,80}", step) else shown(step) for step in steps
    )


_bounded = reprlib.Repr()
_bounded.maxlevel, _bounded.maxlist, _bounded.maxdict, _bounded.maxstring, _bounded.maxother = 2, 4, 4, 60, 60


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
