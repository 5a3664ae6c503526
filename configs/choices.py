"""Keys whose values are the names of a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Choice:
    """An entry of such a table.

    Attributes:
        description: for the reference of keys.
    """

    description: str


@dataclass(frozen=True)
class OneOf:
    """Annotation of a text that is one of these names, as Literal is for names in the code."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.literal_schema([*self.names])


def descriptions(table: Mapping[str, Choice]) -> str:
    """What each entry of a table is, after its name."""
    return " ".join(f"{name}: {entry.description}" for name, entry in table.items())
