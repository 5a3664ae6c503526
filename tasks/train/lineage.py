"""What a run is bound to: dataset, architecture and the settings that must not change; kept in lineage.json."""

import logging
from collections.abc import Mapping
from typing import Any

from infini_llama.configs.deepspeed import TAKEN, engine_settings
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import DataConfig, PipelineConfig, TrainingConfig
from infini_llama.configs.schema.section import Resume, resume_policies
from infini_llama.configs.secrets import without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.lineage import InitialWeights, Lineage, LineageDataset, LineageStage
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.curriculum import last_steps
from infini_llama.tasks.train.initial import refuse_unlike

log = logging.getLogger("infini_llama.train")
POLICIES = resume_policies(TrainingConfig)


def resolved_settings(config: PipelineConfig, plan: EnvironmentPlan, max_steps: int) -> TrainingConfig:
    """Section `train` with what dataset, plan and DeepSpeed decided; what a run's lineage and config.yaml have.

    Raises:
        ConfigError: train.deepspeed_config does not fit the run.
    """
    length = {"max_steps": max_steps, "num_epochs": None, "max_tokens": None}
    planned = {"micro_batch_size": plan.micro_batch_size, "compile": plan.compile}
    train = config.train.model_copy(update=length | planned)
    if train.parallel != "deepspeed":
        return train
    # What agrees with the run's own keys is left out: a micro-batch that an out-of-memory error halves would not agree.
    engine = engine_settings(train, plan.micro_batch_size, plan.precision, plan.world_size)
    return train.model_copy(
        update={"deepspeed_config": {name: value for name, value in engine.items() if name in TAKEN}}
    )


def claim(
    run: RunFolder,
    config: PipelineConfig,
    train: Mapping[str, Any],
    model: LlamaConfig,
    dataset: DatasetRef,
    initial: InitialWeights | None = None,
) -> Lineage:
    """Write config.yaml and lineage.json, or refuse a folder that belongs to another dataset, architecture or start.

    Args:
        train: of `resolved_settings`, by name.
        initial: of `initial_weights`.

    Raises:
        ConfigError: names every difference.
    """
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    before = run.read_lineage()
    if before is None:
        if initial:
            refuse_unlike(initial, model, run.path.parent.parent / dataset.path)
        lineage = Lineage(
            dataset=_bound_dataset(config, dataset),
            model=model.to_dict(),
            train=dict(train),
            init_from=initial,
            curriculum_ends=last_steps(config.data, train["max_steps"]),
        )
    else:
        _refuse_another(run, before, config, train, model, dataset, initial)
        ends = before.curriculum_ends
        if ends is None:
            ends = last_steps(config.data, before.max_steps)
        lineage = before.model_copy(update={"train": dict(train), "curriculum_ends": ends})
    run.write_lineage(lineage)
    written = without_secrets(config).model_dump(mode="json", exclude={"deployment"}) | {"train": dict(train)}
    run.write_config(written)
    return lineage


def _refuse_another(
    run: RunFolder,
    before: Lineage,
    config: PipelineConfig,
    train: Mapping[str, Any],
    model: LlamaConfig,
    dataset: DatasetRef,
    initial: InitialWeights | None,
) -> None:
    """Refuse what would be another run; log what makes the run another one than began."""
    recorded = before.dataset.to_json()
    known = {name: recorded[name] for name in {*before.dataset.model_fields_set, "curriculum"}}
    refused = [*_differences(known, _bound_dataset(config, dataset).to_json(), "dataset").values()]
    refused += _differences(LlamaConfig.from_dict(before.model).to_dict(), model.to_dict(), "model").values()
    changed = _differences(_all_settings(before.train), _all_settings(train), "train")
    changed.pop("init_from", None)  # compared by its digest, below
    refused += [line for name, line in changed.items() if POLICIES.get(name) is Resume.FIXED]
    started, starts = (start.digest if start else "no weights" for start in (before.init_from, initial))
    refused += [f"train.init_from: {started} before, {starts} now"] if started != starts else []
    if refused:
        raise ConfigError(
            f"run folder {run.path} belongs to another run; choose another runtime.name. Differences:\n  "
            + "\n  ".join(refused)
        )
    for name, line in changed.items():
        if POLICIES.get(name) is not Resume.FREE:
            log.warning("%s: from here on, the run is no longer bitwise identical to an uninterrupted one.", line)


def source_weights(data: DataConfig) -> dict[str, float] | None:
    """The weight of each source, which decide the order of samples; None without any."""
    return {source.name: source.weight for source in data.sources if source.weight} or None


def _bound_dataset(config: PipelineConfig, dataset: DatasetRef) -> LineageDataset:
    stages = tuple(
        LineageStage(**stage.model_dump(mode="json"), chunks_digest=table.chunks_digest)
        for stage, table in zip(config.data.curriculum, dataset.curriculum, strict=True)
    )
    return LineageDataset(
        path=dataset.path,
        digest=dataset.digest,
        chunks=dataset.chunks,
        chunks_digest=dataset.chunks_digest,
        sequence_length=dataset.sequence_length,
        weights=source_weights(config.data),
        curriculum=stages or None,
    )


def _all_settings(train: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the defaults of settings that another version does not have; what `auto` stood for is not known."""
    defaults = TrainingConfig().model_dump(mode="json")
    return {name: value for name, value in defaults.items() if value != "auto"} | dict(train)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], section: str) -> dict[str, str]:
    """A sentence for each setting that has another value now, by its name."""
    return {
        key: f"{section}.{key}: {before[key]} before, {now[key]} now"
        for key in before
        if key in now and before[key] != now[key]
    }
