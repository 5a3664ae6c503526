"""A trained model and its tokenizer, out of a run's folder."""

from pathlib import Path

from tokenizers import Tokenizer

from configs.errors import ConfigError, DataError
from model.config import LlamaConfig
from model.llama import Llama
from tasks.artifacts import check, read_manifest
from tasks.train import checkpoints
from tasks.train.run_folder import RunFolder
from tasks.train.worker import checkpoint as tensors_of


def load_model(run_dir: Path, checkpoint: str = "latest") -> tuple[Llama, Tokenizer]:
    """The model at `checkpoint` (latest, best, or a folder of checkpoints/), every checksum verified, and its tokenizer.

    Raises:
        ConfigError: no such run or checkpoint.
        DataError: checkpoint or tokenizer is damaged.
    """
    run = RunFolder(run_dir)
    lineage = run.read(run.lineage)
    if not lineage:
        raise ConfigError(f"{run_dir} is no run folder (it has no lineage.json); give runs/<name> of your home folder.")
    if checkpoint == "latest":
        chosen = checkpoints.newest_good(run.checkpoints)
    else:
        chosen = checkpoints.best(run.checkpoints) if checkpoint == "best" else run.checkpoints / checkpoint
    if chosen is None or not chosen.is_dir():
        raise ConfigError(
            f"run {run_dir.name} has no checkpoint '{checkpoint}'; train it first, or name one of {run.checkpoints}."
        )
    check(chosen, checkpoints.KIND, checksums=True)
    model = Llama(LlamaConfig.from_dict(lineage["model"]))
    tensors_of.load(chosen, tensors_of.tensors(model, optimizer=None))
    tokenizer_file = run_dir.parent.parent / lineage["dataset"]["path"] / "tokenizer.json"
    if not tokenizer_file.exists():
        raise DataError(f"{tokenizer_file} is missing: the dataset of run {run_dir.name} was moved or removed.")
    return model.eval(), Tokenizer.from_file(str(tokenizer_file))


def end_of_text_of(run_dir: Path) -> int:
    """Id of the token that ends a document, of the dataset that the run was trained on."""
    run = RunFolder(run_dir)
    dataset = run_dir.parent.parent / run.read(run.lineage)["dataset"]["path"]
    return read_manifest(dataset, "dataset")["content"]["eos_id"]
