"""What every attempt of one call of the training stage works with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.job import CurriculumStage
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.locks import Lock


@dataclass(frozen=True)
class RunContext:
    """What every attempt of one call of the training stage works with.

    Attributes:
        config: as the user wrote it.
        train: of `lineage.resolved_settings`.
        curriculum: shorter rows that the run starts with.
        verify_on_read: shards are checked when they are first opened.
        invocation: unique ID of one command; all its attempts share it.
        locks: of the run and of its GPUs; torchrun holds them as long as it runs.
        each_poll: called a few times per second; an Exception that it raises is a failure, anything else a request to stop.
    """

    run: RunFolder
    config: PipelineConfig
    train: TrainingConfig
    dataset: DatasetRef
    model: LlamaConfig
    plan: EnvironmentPlan
    curriculum: tuple[CurriculumStage, ...]
    verify_on_read: bool
    invocation: str
    locks: tuple[Lock, ...]
    each_poll: Callable[[], None]

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = self.train.max_steps
        assert steps is not None  # it is resolved
        return steps

    @property
    def dataset_path(self) -> Path:
        """Folder of the dataset."""
        return self.config.runtime.home.resolve() / self.dataset.path

    def micro_batch_size(self, lineage: Lineage) -> int:
        """The micro-batch in force: the plan's, or the smaller one that an out-of-memory error led to."""
        return min(self.plan.micro_batch_size, lineage.micro_batch_size or self.plan.micro_batch_size)
