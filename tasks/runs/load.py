"""A trained model and its tokenizer, out of a run's folder."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema.runtime import default_home
from infini_llama.model.llama import Llama
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.dataset_files import read_tokenizer, verified_manifest
from infini_llama.tasks.storage.tensors import load_tensors, model_tensors


class TrainedRun(NamedTuple):
    """A model in evaluation mode, its tokenizer, and the checkpoint folder that it came from."""

    model: Llama
    tokenizer: Tokenizer
    checkpoint: Path


def load_run(run_dir: Path | str, checkpoint: str = "latest") -> TrainedRun:
    """Load a trained model and its tokenizer; every checksum is verified.

    Args:
        run_dir: the folder of a run, or the name of one in the home folder (INFINI_LLAMA_HOME, else
            ./workspace).
        checkpoint: latest, best, or the name of a folder in checkpoints/.

    Raises:
        ConfigError: no such run or checkpoint.
        DataError: checkpoint or tokenizer is damaged.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        named = default_home() / "runs" / run_dir
        if not named.is_dir():
            raise ConfigError(
                f"{run_dir} is neither the path of a run's folder nor the name of one in "
                f"{named.parent}; `infini-llama runs` lists them."
            )
        run_dir = named
    tokenizer = read_tokenizer(dataset_of(run_dir))
    while True:
        chosen = find_checkpoint(run_dir, checkpoint)
        try:
            if checkpoint != "latest":  # which was verified where it was chosen
                checkpoints.verify(chosen, checksums=True)
            model = Llama(RunFolder(run_dir).require_lineage().model)
            load_tensors(chosen, model_tensors(model))
            return TrainedRun(model.eval(), tokenizer, chosen)
        except (DataError, OSError):
            # Where the training beside this process has pruned it, another one is meant now.
            if chosen.is_dir():
                raise


def find_checkpoint(run_dir: Path, checkpoint: str) -> Path:
    """The folder of a run's checkpoint.

    Args:
        checkpoint: latest (the newest whole one), best, or the name of its folder.

    Raises:
        ConfigError: no such run or checkpoint.
    """
    RunFolder(run_dir).require_lineage()
    folder = RunFolder(run_dir).checkpoints
    if checkpoint == "latest":
        chosen = checkpoints.newest_with_damaged_moved_aside(folder)
    elif checkpoint == "best":
        chosen = checkpoints.best_of(checkpoints.committed(folder))
    else:
        chosen = folder / checkpoint
    if chosen is None or not chosen.is_dir() or chosen.parent != folder:
        raise ConfigError(
            f"run {run_dir.name} has no checkpoint '{checkpoint}'; train it first, or use one of "
            f"those in {folder}."
        )
    return chosen


def dataset_of(run_dir: Path) -> Path:
    """The folder of the dataset that a run was trained on.

    Raises:
        DataError: it was moved or removed, its manifest is damaged, or it is another dataset by
            now.
    """
    bound = RunFolder(run_dir).require_lineage().dataset
    folder = RunFolder(run_dir).dataset(bound.path)
    if not folder.is_dir():
        raise DataError(
            f"{folder} is missing: the dataset of run {run_dir.name} was moved or removed."
        )
    verified_manifest(folder, bound.digest)
    return folder


def end_of_text_of(run_dir: Path) -> int:
    """ID of the token that ends a document, of the dataset that the run was trained on."""
    return verified_manifest(dataset_of(run_dir)).content.eos_id


def end_tokens_of(run_dir: Path) -> tuple[int, ...]:
    """IDs of the tokens that end a text of the run's model; the first is `end_of_text_of`."""
    return (
        RunFolder(run_dir)
        .require_lineage()
        .conversation.ends_with(end_of_text_of(run_dir))
    )
