"""The text of a configuration.

It has YAML 1.2's plain values (`no`, 010 and dates mean what they look like), each key once, and no
tags.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, JsonValue

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.pointers import refuse_pointer

JsonObject = dict[str, JsonValue]
Model = TypeVar("Model", bound=BaseModel)
TAG = "tag:yaml.org,2002:"
NULLS = ("", "~", "null", "Null", "NULL")
# Bytes of a file, and values that it writes out; PyYAML reads some 30,000 entries per second.
LARGEST = 2**18


def expanded(path: str | Path) -> Path:
    """The path with the home folder in place of ~.

    Where there is no such user it stays as it is, where pathlib raises an error.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without tags.

    Numbers, true/false and null are as YAML 1.2 (core schema) reads them; all else is text.
    """

    # PyYAML's own declaration; replaces its YAML 1.1 rules.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag:
            raise _fault(
                f"the tag {tag.replace(TAG, '!!')} is not allowed; write plain values",
                event.start_mark,
            )
        return super().compose_node(parent, index)


def _values(node: yaml.Node, counted: dict[int, int]) -> int:
    """The number of values that a node writes out, with those that its aliases refer to.

    Nine lines of nine aliases each are 387 million.
    """
    if id(node) not in counted:
        # An alias that contains itself is refused where it is constructed.
        counted[id(node)] = 0
        inner: Any = node.value if isinstance(node, yaml.CollectionNode) else ()
        values = 1
        for entry in inner:
            parts = entry if isinstance(entry, tuple) else (entry,)
            for part in parts:
                values += _values(part, counted)
        counted[id(node)] = values
    return counted[id(node)]


def _fault(sentence: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=sentence, problem_mark=mark)


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> JsonObject:
    mapping: JsonObject = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _fault("a key must be a plain word", key_node.start_mark)
        if key_node.value == "<<":
            raise _fault(
                "merge keys (<<) are not part of YAML 1.2; write the keys out",
                key_node.start_mark,
            )
        if key_node.value in mapping:
            raise _fault(
                f"the key '{key_node.value}' is there twice", key_node.start_mark
            )
        mapping[key_node.value] = loader.construct_object(value_node, deep=True)
    return mapping


def _sequence(loader: _StrictLoader, node: yaml.SequenceNode) -> list[JsonValue]:
    return [loader.construct_object(item, deep=True) for item in node.value]


def _whole_number(_: _StrictLoader, node: yaml.ScalarNode) -> int:
    base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
    try:
        return _of_64_bits(node.value, base)
    except ValueError:
        raise _fault("a number has too many digits", node.start_mark) from None


def _of_64_bits(digits: str, base: int = 10) -> int:
    number = int(digits, base)  # Python refuses to convert thousands of digits
    if abs(number) >= 2**63:  # torch does not take more
        raise ValueError(digits)
    return number


_StrictLoader.add_constructor(TAG + "map", _mapping)
_StrictLoader.add_constructor(TAG + "seq", _sequence)
_StrictLoader.add_constructor(TAG + "int", _whole_number)
for _kind, _pattern in {
    "null": "|".join(NULLS),
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}.items():
    _StrictLoader.add_implicit_resolver(
        TAG + _kind, re.compile(rf"^(?:{_pattern})$"), None
    )


# Plain messages for PyYAML's errors, by how those begin.
PLAIN_WORDS = {
    "mapping values are not allowed": (
        "a ':' is where no key can begin; check the indentation, or put the text in quotes"
    ),
    "found character '\\t'": "a tab is where only spaces are allowed; indent with spaces",
    "found unconstructable recursive node": "an alias contains itself",
    "but found another document": "a second document begins; a configuration is one",
    "expected <block end>": (
        "this line's indentation fits no line above, or a quote or bracket is open"
    ),
    "could not find expected ':'": "a ':' is missing after a key",
}


def parse_yaml(text: str) -> JsonValue:
    """One YAML document as plain values.

    Raises:
        ValueError: what is wrong, with the line where it is known.
    """
    try:
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node and _values(node, {}) > LARGEST:
                raise ValueError(f"its aliases write out more than {LARGEST:,} values")
            return loader.construct_document(node) if node else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        fault = str(error.problem or error.context)
        plain = next(
            (words for begin, words in PLAIN_WORDS.items() if fault.startswith(begin)),
            fault,
        )
        raise ValueError(f"line {mark.line + 1 if mark else '?'}: {plain}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f"line {line}: the character {text[error.position]!r} is not allowed in YAML"
        ) from None
    except OverflowError:
        raise ValueError("an escape \\U names no character") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(text: str) -> JsonValue:
    """One JSON document.

    Raises:
        ValueError: what is wrong, with the line where it is known.
    """

    def integer(digits: str) -> int:
        try:
            return _of_64_bits(digits)
        except ValueError:
            line = text.count("\n", 0, text.index(digits)) + 1
            raise ValueError(f"line {line}: a number has too many digits") from None

    try:
        return json.loads(text, object_pairs_hook=once, parse_int=integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dotted(section: JsonObject, before: str = "") -> JsonObject:
    """{"train": {"seed": 1}} as {"train.seed": 1}."""
    flat: JsonObject = {}
    for key, value in section.items():
        if isinstance(value, dict):
            flat |= dotted(value, f"{before}{key}.")
        else:
            flat[before + key] = value
    return flat


def once(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    """The object of these pairs, of which no key is there twice.

    Raises:
        ValueError: one is.
    """
    mapping: JsonObject = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        mapping[key] = value
    return mapping


def read_mapping(file: Path) -> JsonObject:
    """The sections of a .yaml, .yml or .json file.

    Raises:
        ConfigError: a folder, a pipe, too large, unreadable, not UTF-8, not YAML or JSON, empty, or
            no mapping.
    """
    if file.exists() and not file.is_file():  # reading a pipe would wait for its writer
        kind = "a folder" if file.is_dir() else "not a regular file"
        raise ConfigError(f"{file} is {kind}; give a .yaml or .json file.")
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"{file} is neither .yaml, .yml nor .json; rename it so that its format is known."
        )
    refuse_pointer(file)
    try:
        size = file.stat().st_size
        if size > LARGEST:
            raise ConfigError(
                f"{file} has {size:,} bytes, and a configuration has at most {LARGEST:,}; replace "
                "a long list of files with a folder or a glob."
            )
        text = file.read_bytes().decode("utf-8-sig")
        content = parse_json(text) if file.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8 text."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file}, {error}.") from None
    if content is None:
        raise ConfigError(
            f"{file} is empty; it needs sections such as data, model and train."
        )
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a single value"
        raise ConfigError(
            f"{file} contains {kind}, not sections such as data, model and train."
        )
    return content


def changed(record: Model, **values: Any) -> Model:
    """A record or a section of the configuration with other values of these fields.

    They are validated as if they had been given.

    Raises:
        TypeError: it has no such field.
        pydantic.ValidationError: a value that the field does not take.
    """
    kind = type(record)
    unknown = values.keys() - kind.model_fields.keys()
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    fields = {name: getattr(record, name) for name in record.model_fields_set}
    return kind.model_validate(fields | values, by_name=True)
