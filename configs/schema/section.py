"""What every section of the configuration has in common."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict


class Resume(StrEnum):
    """What changing a key means for a run that already has checkpoints.

    FIXED: refused. EXACT: allowed; the run logs that it is no longer bitwise. FREE: no effect on the weights.
    """

    FIXED = "fixed"
    EXACT = "exact"
    FREE = "free"


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, defaults are checked like given values."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


def on_resume(policy: Resume) -> JsonDict:
    """The metadata of a field: `Field(..., json_schema_extra=on_resume(Resume.FREE))`."""
    return {"resume": policy.value}


def resume_policies(section: type[Section]) -> dict[str, Resume]:
    """The resume policy of each field of a section that states one."""
    extras = {name: field.json_schema_extra for name, field in section.model_fields.items()}
    return {name: Resume(extra["resume"]) for name, extra in extras.items() if isinstance(extra, dict)}
