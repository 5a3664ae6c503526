"""Writes docs/configuration.md, the reference of every key, from the schema: `python docs/make_reference.py`."""

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ByteSize
from pydantic_core import PydanticUndefined

from infini_llama.configs.keys import section_of, words
from infini_llama.configs.schema import PipelineConfig

TARGET = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Every key of a run's YAML (or JSON) file. What is left out has the default. In italics stands what a key takes. On the command line any
key can be set as `section.key=value`, which wins over the file. An unknown key, or a value that is not allowed, ends the command with
exit code 64 and a sentence for each; nothing is started.

This page is made from the schema (`configs/schema/`) by `python docs/make_reference.py`; a test keeps it true.
"""


def reference() -> str:
    """The page, whatever home folder this machine has."""
    os.environ.pop("INFINI_LLAMA_HOME", None)
    return HEAD + "".join(section(name, field.annotation) for name, field in PipelineConfig.model_fields.items())


def section(path: str, holder: Any) -> str:
    """A heading, a table of the section's own keys, and the sections inside it."""
    inner = [
        (f"{path}.{name}", found) for name, field in holder.model_fields.items() if (found := entry(field.annotation))
    ]
    rows = "".join(
        row(name, field) for name, field in holder.model_fields.items() if section_of(field.annotation) is None
    )
    table = f"\n| key | |\n|---|---|\n{rows}" if rows else ""
    return f"\n## {path}\n\n{holder.__doc__.strip().splitlines()[0]}\n{table}" + "".join(section(*one) for one in inner)


def entry(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, or that the items of its list are, or that it may hold."""
    if found := section_of(annotation):
        return found
    return next((found for argument in get_args(annotation) if (found := entry(argument))), None)


def row(name: str, field: Any) -> str:
    allowed = words(Annotated[field.annotation, field] if field.metadata else field.annotation)
    return f"| `{name}` | {plain(field.description)} *{plain(allowed)}*; default: {default(field)} |\n"


def default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool | type(None)):
        return {True: "`true`", False: "`false`", None: "`null`"}[value]
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator='')}`"
    if isinstance(value, Enum):
        value = value.value
    return f"`{value}`" if str(value) else "empty"


def plain(text: str) -> str:
    """Fit for a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
