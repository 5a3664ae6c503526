"""Where copies are kept beyond this machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from infini_llama.configs.schema.section import Section, free


class StorageConfig(Section):
    """Where datasets and checkpoints are mirrored."""

    mirror: Annotated[str, Field(min_length=1)] | None = free(
        default=None,
        title="Mirror",
        description="A folder or bucket to copy committed datasets and checkpoints to, in the background, for "
        "example /mnt/backup or s3://bucket/project. An empty home folder is restored from it. "
        "Credentials come from the environment. null: none.",
    )
