"""train.init_from: weights of another model to start from, as part of a run's lineage."""

import logging
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import expanded
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.lineage import InitialWeights, Lineage
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.dataset_files import read_tokenizer, verified_manifest
from infini_llama.tasks.storage.hf_folder import (
    TOKENIZER,
    Folder,
    conversation_of,
    open_folder,
    tokenizer_of,
)
from infini_llama.tasks.tokenizers.encoder import encoder_of, first_difference
from infini_llama.tasks.tokenizers.engines import golden
from infini_llama.tasks.tokenizers.tokenizer import load

log = logging.getLogger("infini_llama.train")
SHOWN = 40  # characters of a text in an error message
# Keys that may differ from the model that the weights are of: what is trained without parameters of
# its own, and what only training sees.
FREE = {
    "attention",
    "segment_length",
    "attend_previous_segment",
    "memory_layers",
    "memory_update",
    "memory_write_jitter",
    "attention_dropout",
    "hidden_dropout",
    "initializer_range",
    "max_position_embeddings",
    "pad_vocab_to_multiple_of",
    "vocab_size",  # checked by the tokens, since tables are often larger than the vocabulary
}
# Keys that may differ as well, to lengthen what a model reads. A warning is logged, since that
# changes what the weights compute.
ANNOUNCED = {"rope_theta", "rope_scaling"}


def initial_weights(
    init_from: str | None, lineage: Lineage | None = None
) -> InitialWeights | None:
    """The weights that a run starts from: the folder of `train.init_from`, None without one.

    Where the folder is gone, a run that has begun uses what its lineage records: its checkpoints
    hold the weights.

    Raises:
        ConfigError, DataError: the folder cannot be imported.
    """
    if init_from is None:
        return None
    before = lineage.init_from if lineage else None
    if before and not expanded(init_from).exists():
        log.warning(
            "train.init_from=%s no longer exists; the run continues from its checkpoints.",
            init_from,
        )
        return before
    folder = open_folder(Path(init_from))
    return InitialWeights(
        path=str(folder.path),
        digest=folder.digest(),
        vocab_size=folder.config.vocab_size,
        max_position_embeddings=folder.config.max_position_embeddings,
        conversation=conversation_of(folder),
        # A run that has begun keeps its value, since its jitter is fixed.
        memory=before.memory if before else folder.config.attention == "infini",
    )


def check_start(config: PipelineConfig) -> None:
    """Check, before any text is read, the folder from which a new run starts.

    Raises:
        ConfigError: the folder cannot be imported, or nothing names a tokenizer for its weights.
        DataError: a file is missing or damaged.
    """
    if config.train.init_from is None or RunFolder.of(config.runtime).has_begun():
        return
    folder = open_folder(Path(config.train.init_from))
    if not (config.data.tokenizer.path or config.data.tokenizer.encoding):
        tokenizer_of(folder)


def refuse_unlike(initial: InitialWeights, model: LlamaConfig, dataset: Path) -> None:
    """Check that the weights have the configured architecture and the dataset's tokens.

    Raises:
        ConfigError: every difference, a line per difference.
    """
    folder = open_folder(Path(initial.path))
    imported = folder.config.to_dict()
    configured = model.to_dict()
    # Maps that the folder lacks begin as the identity, and without a memory none are needed.
    if model.memory_maps or model.attention != "infini":
        imported["memory_maps"] = model.memory_maps
    differing = [
        name
        for name in configured
        if name not in FREE and configured[name] != imported[name]
    ]
    lines = [
        f"model.{name}: {configured[name]} here, {imported[name]} there"
        for name in differing
        if name not in ANNOUNCED
    ]
    if lines:
        raise ConfigError(
            f"train.init_from={folder.path} has another architecture; "
            "'infini-llama import' writes a matching configuration",
            lines,
        )
    for name in differing:
        log.warning(
            "model.%s is %s here and was %s when the weights were trained.",
            name,
            configured[name],
            imported[name],
        )
    _refuse_other_tokens(folder, dataset)


def _refuse_other_tokens(folder: Folder, dataset: Path) -> None:
    """Refuse a dataset whose tokenizer is not the folder's; a folder without one is accepted.

    Two tokenizers with one vocabulary may still cut words otherwise, so the IDs of texts are
    compared, too.
    """
    if not (folder.path / TOKENIZER).is_file():
        log.warning(
            "%s has no tokenizer.json, so whether its tokens are those of the dataset "
            "cannot be checked.",
            folder.path,
        )
        return
    tokenizer = read_tokenizer(dataset)
    if tokenizer.get_vocab() != tokenizer_of(folder).get_vocab():
        raise ConfigError(
            f"train.init_from={folder.path} has other tokens than the dataset; "
            f"set data.tokenizer.path={folder.path}."
        )
    content = verified_manifest(dataset).content
    end = tokenizer.id_to_token(content.eos_id)
    of_weights = load(TokenizerConfig(path=str(folder.path), eos=end))
    split_special_tokens = not content.text_yields_special_tokens
    text = first_difference(
        encoder_of(tokenizer, split_special_tokens),
        encoder_of(of_weights, split_special_tokens),
        golden(tokenizer),
    )
    if text is not None:
        raise ConfigError(
            f"train.init_from={folder.path} has the tokens of the dataset, but its tokenizer gives "
            f"text other IDs, for example {text[:SHOWN]!r}; "
            f"set data.tokenizer.path={folder.path}."
        )
