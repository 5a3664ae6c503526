"""The plan of one attempt, decided before it starts; all that its workers are given."""

from pathlib import Path

from pydantic import Field

from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.metrics import Goodput, StartTime
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.record import Record


class AttemptPlan(Record):
    """One attempt at a run: made from configuration, dataset, plan and the run's history.

    It is written into the attempt's folder.

    Attributes:
        from_step: of the checkpoint that it starts from.
        config: as the user wrote it.
        lineage: what the run is bound to, and what failures have changed; a copy of lineage.json.
        verify_on_read: check each shard's checksum when it is first opened.
        invocation: unique ID of one command, or of one flow run; all its attempts share it.
        resume_from: checkpoint folder; None: start from step 0.
        goodput: of the attempts before this one.
        evaluation_time: seconds that an evaluation of the run has taken at most; 0: none was made.
        since_evaluation, since_save: seconds of training, for intervals in minutes.
    """

    started: StartTime
    from_step: int = 0
    run_dir: Path
    config: PipelineConfig
    dataset: DatasetRef
    plan: EnvironmentPlan
    lineage: Lineage
    verify_on_read: bool = False
    invocation: str = ""
    resume_from: Path | None = None
    goodput: Goodput = Field(default_factory=Goodput)
    evaluation_time: float = 0.0
    since_evaluation: float = 0.0
    since_save: float = 0.0

    @property
    def model(self) -> LlamaConfig:
        return self.lineage.model

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.lineage.max_steps

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass of one process.

        The plan's, but at most `micro_batch_limit`, also where the plan was made after the limit.
        """
        planned = self.plan.micro_batch_size
        limit = self.lineage.micro_batch_limit or planned
        return min(planned, limit)

    @property
    def dataset_path(self) -> Path:
        return self.run_dir.parents[1] / self.dataset.path

    @property
    def shorter_rows(self) -> tuple[tuple[str, int], ...]:
        """The row tables that the run starts with, in order.

        Of each: its name, and the first sample that is not taken from it.
        """
        batch_size = self.config.train.global_batch_size
        names = [table.row_table for table in self.dataset.curriculum]
        ends = [last_step * batch_size for last_step in self.lineage.curriculum_ends]
        return tuple(zip(names, ends, strict=True))

    @property
    def init_from(self) -> Path | None:
        """Hugging Face folder with the first weights; None: random ones, or `resume_from`."""
        initial = self.lineage.init_from
        return Path(initial.path) if initial and not self.resume_from else None

    def settings(self) -> JsonObject:
        """The configuration, and what it came to under `resolved`; for experiment trackers."""
        came_to = self.plan.pinned().to_json() | {
            "max_steps": self.max_steps,
            "micro_batch_size": self.micro_batch_size,
        }
        return self.config.model_dump(mode="json", exclude={"deployment"}) | {
            "resolved": came_to
        }

    def to_json(self) -> JsonObject:
        """The plan as it may be written down: variables that may hold secrets are masked.

        Workers have them in their environment.
        """
        config = without_secrets(self.config)
        fields = super().to_json()
        fields["config"] = config.model_dump(mode="json", exclude={"deployment"})
        fields["plan"] = self.plan.masked().to_json()
        return fields
