"""Reading of text for a run: its places, its targets, and its token IDs."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.runs.load import dataset_of
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.dataset_files import verified_manifest
from infini_llama.tasks.tokenizers.encoder import TextEncoder, encoder_of_dataset


@dataclass(frozen=True, eq=False)
class Reading:
    """How a run reads text, the same for its dataset, other files, and prompts.

    Attributes:
        data: sources, formats and columns, filters, rows, and what has a target.
        encoder: of documents and prompts.
        end_of_text: ID of the token that ends a document.
    """

    data: DataConfig
    encoder: TextEncoder
    end_of_text: int

    def prompt_in_file(self, text: str) -> str:
        """The prompt that a file has: its text without one line end that an editor adds.

        A text that ends as the prompts of the run's documents do (data.answer_after) is one as it
        is.
        """
        sections = self.data.sources or [self.data]
        marks = tuple(
            section.answer_after for section in sections if section.answer_after
        )
        if text.endswith(marks):
            return text
        line_end = "\r\n" if text.endswith("\r\n") else "\n"
        return text.removesuffix(line_end)


def reading_of(run_dir: Path) -> Reading:
    """How the run in this folder reads text: as its configuration says, or that of its dataset.

    Raises:
        ConfigError: it is the folder of no run.
        DataError: the run's dataset is missing or damaged, or its configuration is.
    """
    dataset = dataset_of(run_dir)
    manifest = verified_manifest(dataset)
    data = _parsed(manifest.meta.data, dataset)
    config = RunFolder(run_dir).read_config() or {}
    if "data" in config:
        of_run = _parsed(config["data"], run_dir)
        # `train --dataset` names a dataset that another configuration has prepared.
        if _targets(of_run) == _targets(data):
            data = of_run
    return Reading(
        data=data,
        encoder=encoder_of_dataset(dataset),
        end_of_text=manifest.content.eos_id,
    )


def _targets(data: DataConfig) -> dict[str, tuple[str, str]]:
    """What has a target in each source, by its name; "" is that of the section `data`."""
    if not data.sources:
        return {"": (data.loss_on, data.answer_after)}
    return {
        source.name: (source.loss_on, source.answer_after) for source in data.sources
    }


def _parsed(section: JsonValue, folder: Path) -> DataConfig:
    """The section `data` that the run or dataset in this folder has recorded."""
    try:
        return DataConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("data", *first["loc"])))
        raise Damaged(
            f"{folder}: its record of {place} cannot be read ({first['msg']})."
        ) from None
