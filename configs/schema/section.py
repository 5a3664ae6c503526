"""What every section of the configuration has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, defaults are checked like given values."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
