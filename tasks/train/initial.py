"""train.init_from: weights of another model to start from, as part of a run's lineage."""

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.storage.hf_folder import Folder, open_folder

log = logging.getLogger("infini_llama.train")
# May differ from the model that the weights are of: what is trained without parameters of its own, and what only training sees.
FREE = {
    "attention",
    "segment_length",
    "memory_update",
    "first_segment",
    "memory_gradient_segments",
    "attention_dropout",
    "hidden_dropout",
    "initializer_range",
    "max_position_embeddings",
    "vocab_size",  # checked by the tokens, since tables are often larger than the vocabulary
}
# May differ as well, to lengthen what a model reads; said aloud, since it changes what the weights compute.
ANNOUNCED = {"rope_theta", "rope_scaling"}


def initial_of(config: dict, lineage: dict) -> dict[str, Any] | None:
    """What a run starts from: {"path", "digest", "vocab_size"} of the folder that `train.init_from` names, None without one.

    Where the folder is gone, a run that has begun goes by what it remembers: its checkpoints hold the weights.

    Raises:
        ConfigError, DataError: the folder cannot be imported.
    """
    named = config["train"]["init_from"]
    if named is None:
        return None
    before = lineage.get("init_from")
    if before and not Path(named).expanduser().exists():
        log.warning("train.init_from=%s is gone; the run's checkpoints are what it goes on from.", named)
        return before
    folder = open_folder(Path(named))
    return {"path": str(folder.path), "digest": folder.digest(), "vocab_size": folder.config.vocab_size}


def refuse_unlike(initial: dict, model: dict, dataset: Path) -> None:
    """That the configured architecture is the one that the weights are of, and the dataset's tokens those that they know.

    Raises:
        ConfigError: every difference, a line each.
    """
    folder = open_folder(Path(initial["path"]))
    theirs, ours = folder.config.to_dict(), LlamaConfig.from_dict(model).to_dict()
    differing = [name for name in ours if name not in FREE and ours[name] != theirs[name]]
    lines = [f"model.{name}: {ours[name]} here, {theirs[name]} there" for name in differing if name not in ANNOUNCED]
    if lines:
        raise ConfigError(
            f"train.init_from={folder.path} is of another architecture; 'infini-llama import' writes a configuration of it:\n  "
            + "\n  ".join(lines)
        )
    for name in differing:
        log.warning("model.%s is %s here and was %s when the weights were trained.", name, ours[name], theirs[name])
    _refuse_other_tokens(folder, dataset)


def _refuse_other_tokens(folder: Folder, dataset: Path) -> None:
    """That both have the same tokenizer; a folder without one is believed."""
    theirs = folder.path / "tokenizer.json"
    if not theirs.is_file():
        log.warning("%s has no tokenizer.json: nothing proves that its tokens are the dataset's.", folder.path)
        return
    try:
        known = Tokenizer.from_file(str(theirs)).get_vocab()
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise DataError(f"{theirs} is no tokenizer ({error}).") from None
    if Tokenizer.from_file(str(dataset / "tokenizer.json")).get_vocab() != known:
        raise ConfigError(
            f"train.init_from={folder.path} knows other tokens than the dataset has; set data.tokenizer.path={folder.path}."
        )
    if len(known) > folder.config.vocab_size:
        raise ConfigError(
            f"{theirs} has {len(known)} tokens and the model's table {folder.config.vocab_size}; the folder is not of one piece."
        )
