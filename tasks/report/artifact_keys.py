"""The keys of a run's Prefect artifacts."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ArtifactKeys:
    """Names of the Prefect artifacts of a run.

    Attributes:
        run: name of the run.
        series: what runs share whose artifacts are versions of each other: the deployment, or the
            run itself without one.
    """

    run: str
    series: str

    def key(self, kind: str) -> str:
        """Key of an artifact: lower-case letters, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{self.series}".lower()).strip("-")
