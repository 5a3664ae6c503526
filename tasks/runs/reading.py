"""How a run reads text: where from, what of it has a target, and how it becomes IDs."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from infini_llama.configs.reading import JsonObject
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
        marks = tuple(section.answer_after for section in sections if section.answer_after)
        if text.endswith(marks):
            return text
        line_end = "\r\n" if text.endswith("\r\n") else "\n"
        return text.removesuffix(line_end)


def reading_of(run_dir: Path) -> Reading:
    """How the run in this folder reads text.

    Raises:
        ConfigError: it is the folder of no run.
        DataError: the run's dataset is missing or damaged, or its configuration is.
    """
    dataset = dataset_of(run_dir)
    manifest = verified_manifest(dataset)
    config = RunFolder(run_dir).read_config() or {}
    section = config.get("data") or manifest.meta.data
    return Reading(
        data=_parsed(section, run_dir),
        encoder=encoder_of_dataset(dataset),
        end_of_text=manifest.content.eos_id,
    )


def _parsed(section: JsonObject, run_dir: Path) -> DataConfig:
    try:
        return DataConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("data", *first["loc"])))
        raise Damaged(
            f"{RunFolder(run_dir).config}: {place} cannot be read ({first['msg']})."
        ) from None
