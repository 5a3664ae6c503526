"""Where copies are kept beyond this machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from infini_llama.configs.schema.section import Section


class StorageConfig(Section):
    """Where copies are kept beyond this machine."""

    mirror: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        title="Mirror",
        description="A folder or bucket, such as s3://bucket/project or /mnt/backup, to which what is committed is copied "
        "while training goes on, and from which an empty home is filled; null: none. Credentials come from the environment.",
    )
