"""The base of every record."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from infini_llama.configs.reading import JsonObject


class Record(BaseModel):
    """An immutable value with named, typed fields that is JSON between stages, processes and runs.

    Attributes:
        json_without: which fields a subclass leaves out of its JSON: those never set, those with
            their default, or those that are None; None: it leaves out none.
    """

    # Validators are built at a record's first use: a process uses a few of the hundred.
    model_config = ConfigDict(
        frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True
    )
    json_without: ClassVar[Literal["unset", "defaults", "none"] | None] = None

    def to_json(self) -> JsonObject:
        """JSON-serializable fields."""
        without = self.json_without
        return self.model_dump(
            mode="json",
            exclude_unset=without == "unset",
            exclude_defaults=without == "defaults",
            exclude_none=without == "none",
        )


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong, after the name of its field, if it is one."""
    fault = error.errors(include_url=False)[0]
    field = ".".join(map(str, fault["loc"]))
    parts = (field, fault["msg"])
    return ": ".join(part for part in parts if part)
