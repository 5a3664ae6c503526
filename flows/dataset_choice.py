"""The dataset that a run trains on: one decision for `run`, the flow, `train` and --dry-run."""

import logging
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.configs.reading import JsonObject, changed
from infini_llama.configs.schema import DataConfig, PipelineConfig
from infini_llama.configs.schema.section import Resume, resume_policies
from infini_llama.configs.schema.sources import SourceConfig
from infini_llama.tasks.preprocess.rows.references import reference_for
from infini_llama.tasks.preprocess.stage import Preparation
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import ROW_TABLES, Damaged, has_all_files
from infini_llama.tasks.storage.dataset_files import REPAIR, verify_dataset

# Keys that a resumed run may change: of the section, and of an entry of data.sources.
MAY_CHANGE = {
    name
    for name, policy in resume_policies(DataConfig).items()
    if policy is not Resume.FIXED
}
MAY_CHANGE_OF_SOURCE = {
    name
    for name, policy in resume_policies(SourceConfig).items()
    if policy is not Resume.FIXED
}
log = logging.getLogger("infini_llama.preprocess")


class DatasetOfRun(NamedTuple):
    """The complete dataset of a run that has begun, whose text has the same settings still.

    Attributes:
        config: the run's configuration, as it is stored.
    """

    reference: DatasetRef
    config: JsonObject
    is_finished: bool


def choose_dataset(
    config: PipelineConfig, reads_text: bool, named: Path | None = None
) -> Preparation:
    """Choose between today's text, the dataset that the run began with, and one that is named.

    A run that has not finished keeps its dataset: text that was added, changed or removed between a
    failure, a stop or a suspension and the next attempt does not end it. A finished run keeps it
    only where today's text cannot be read: training refuses other text under its name.

    Args:
        reads_text: text that is not known is read to find out whether it has changed.
        named: folder of a dataset, which is used whatever the text is.

    Returns:
        a preparation, whose `of_run` is the dataset if it is not that of today's text.
    """
    home = config.runtime.home
    preparation = Preparation(config.data, home)
    if named is not None:
        preparation.of_run = reference_for(config.data, named, home)
        return preparation
    kept = dataset_of_run(config)
    if kept is None:
        return preparation
    try:
        today = _path_of_today(preparation, reads_text)
    except PipelineError as fault:
        reason = f"the text cannot be read as before ({str(fault).rstrip('.')})"
    else:
        if kept.is_finished or today == kept.reference.path:
            return preparation
        reason = "" if today is None else "the text has changed"
    if reason:
        log.warning(
            "%s since run %s began; the run continues with its dataset %s. "
            "Another runtime.name trains on today's text.",
            reason,
            config.runtime.name,
            kept.reference.name,
        )
    preparation.of_run = kept.reference
    return preparation


def _path_of_today(preparation: Preparation, reads_text: bool) -> str | None:
    """Path below the home folder of the dataset of today's text; None: it is not known."""
    if reads_text:
        return f"datasets/{preparation.plan().name}"
    reference = preparation.lookup()
    return None if reference is None else reference.path


def dataset_of_run(config: PipelineConfig) -> DatasetOfRun | None:
    """The dataset of a run that has begun.

    Returns:
        None: the run has not begun, its dataset is not complete, or the settings of its text are
        not the same any more.
    """
    run = RunFolder.of(config.runtime)
    if not run.has_begun():
        return None
    try:
        record = RunReader(run.path)
        stored = DataConfig.model_validate(record.config.get("data"))
        if _kept_settings(stored) != _kept_settings(config.data):
            return None
        folder = config.runtime.home / record.lineage.dataset.path
        reference = reference_for(config.data, folder, config.runtime.home)
        dataset = changed(reference, text=record.lineage.text)
        is_whole = has_all_files(folder, "dataset") and all(
            has_all_files(folder / ROW_TABLES / table.row_table, ROW_TABLES)
            for table in dataset.row_tables
        )
        kept = DatasetOfRun(
            dataset, record.config, is_finished=record.result is not None
        )
    except (Damaged, ConfigError, ValidationError):
        # The stages name and repair what is damaged.
        return None
    return (
        kept if is_whole and dataset.digest == record.lineage.dataset.digest else None
    )


def require_dataset_of_run(config: PipelineConfig, repaired: DatasetRef) -> None:
    """Compare the checksums of the dataset that the run was begun with, if it is another one.

    Raises:
        DataError: it is damaged, which today's text cannot repair.
    """
    run = RunFolder.of(config.runtime)
    if not run.has_begun():
        return
    bound = run.require_lineage().dataset
    if bound.path == repaired.path:
        return
    try:
        verify_dataset(run.dataset(bound.path))
    except DataError as error:
        fault = str(error).removesuffix(REPAIR).rstrip()
        raise DataError(
            f"{repaired.name}, of today's text, is whole, but run {config.runtime.name} began with "
            f"{Path(bound.path).name}, which is damaged: {fault} Restore the text "
            "of that time and repeat this command, or use another runtime.name."
        ) from None


def _kept_settings(data: DataConfig) -> JsonObject:
    """The settings of the text without those that a resumed run may change."""
    of_sources = {"__all__": MAY_CHANGE_OF_SOURCE}
    return data.model_dump(
        mode="json", exclude={**dict.fromkeys(MAY_CHANGE, True), "sources": of_sources}
    )
