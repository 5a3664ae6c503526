"""The base of every section of the configuration."""

from enum import StrEnum
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Resume(StrEnum):
    """The effect of changing a key on a run that already has checkpoints.

    FIXED: refused.
    INEXACT: allowed; the run logs that it is no longer bitwise.
    FREE: no effect on the weights.
    """

    FIXED = "fixed"
    INEXACT = "inexact"
    FREE = "free"


class Section(BaseModel):
    """A part of the configuration.

    Unknown keys are refused, and defaults are checked like given values.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        # Prefect's form shows the keys as a file has them.
        field_title_generator=lambda name, _: name,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_a_flag_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is expected; pydantic would take true as 1."""
        assert info.field_name is not None
        if isinstance(value, bool) and _is_number(cls.model_fields[info.field_name].annotation):
            raise PydanticCustomError("flag_as_number", "true and false are no numbers")
        return value


def _is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_is_number, get_args(annotation)))


def fixed(**field: Any) -> Any:
    """A pydantic `Field` whose policy is `Resume.FIXED`."""
    return Field(**field, json_schema_extra={"resume": Resume.FIXED.value})


def inexact(**field: Any) -> Any:
    """A pydantic `Field` whose policy is `Resume.INEXACT`."""
    return Field(**field, json_schema_extra={"resume": Resume.INEXACT.value})


def free(**field: Any) -> Any:
    """A pydantic `Field` whose policy is `Resume.FREE`."""
    return Field(**field, json_schema_extra={"resume": Resume.FREE.value})


def resume_policies(section: type[Section]) -> dict[str, Resume]:
    """The resume policy of each field of a section that states one."""
    extras = {name: field.json_schema_extra for name, field in section.model_fields.items()}
    return {
        name: Resume(extra["resume"]) for name, extra in extras.items() if isinstance(extra, dict)
    }
