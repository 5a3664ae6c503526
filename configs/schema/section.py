"""The base of every section of the configuration."""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


class Resume(StrEnum):
    """The effect of changing a key on a run that already has checkpoints.

    FIXED: refused.
    INEXACT: allowed until the run has finished; it logs that it is no longer bitwise.
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
        if isinstance(value, bool) and _is_number(
            cls.model_fields[info.field_name].annotation
        ):
            raise PydanticCustomError("flag_as_number", "true and false are no numbers")
        return value


def _is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_is_number, get_args(annotation)))


# Extra of a field with a path, or a list of them.
PATH: dict[str, Any] = {"format": "path"}


def _with_policy(
    policy: Resume,
    *,
    is_path: bool = False,
    read_by: Sequence[str] = (),
    **field: Any,
) -> Any:
    """A pydantic `Field` with a resume policy.

    Args:
        is_path: it holds paths, in which environment variables are replaced.
        read_by: sources that read the key; empty: all do, or it is no key of a source.
    """
    extra: dict[str, Any] = {"resume": policy.value}
    if is_path:
        extra |= PATH
    if read_by:
        extra["read_by"] = list(read_by)
    return Field(**field, json_schema_extra=extra)


fixed = partial(_with_policy, Resume.FIXED)
inexact = partial(_with_policy, Resume.INEXACT)
free = partial(_with_policy, Resume.FREE)


def _extra(field: FieldInfo) -> dict[str, Any]:
    """What `fixed`, `inexact` and `free` add to a field."""
    extra = field.json_schema_extra
    if extra is None or callable(extra):
        return {}
    return extra


def has_paths(field: FieldInfo) -> bool:
    """Whether a field holds a path, or a list of them."""
    return _extra(field).get("format") == PATH["format"]


def resume_policies(section: type[Section]) -> dict[str, Resume]:
    """The resume policy of each field of a section that states one."""
    policies = {
        name: _extra(field).get("resume")
        for name, field in section.model_fields.items()
    }
    return {name: Resume(policy) for name, policy in policies.items() if policy}


def readers_of(section: type[Section]) -> dict[str, Sequence[str]]:
    """The sources that read each key of a section; none: all of them do."""
    return {
        name: _extra(field).get("read_by", [])
        for name, field in section.model_fields.items()
    }
