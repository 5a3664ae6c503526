"""The base of every record."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """An immutable value with named, typed fields that is JSON between stages, processes and runs.

    Fields that this version does not know are ignored, so that a file of a newer version can be read. A file of an older
    version passes through `upgrade`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def upgrade(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of this version, from those that an older one wrote."""
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Validate what was parsed from JSON.

        Raises:
            pydantic.ValidationError: a field is missing or has another type.
        """
        return cls.model_validate(cls.upgrade(fields))

    def to_json(self) -> dict[str, Any]:
        """JSON-serializable fields."""
        return self.model_dump(mode="json")
