"""`infini-llama import`: a model's folder, and a configuration that starts from its weights."""

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.reading import JsonObject, expanded
from infini_llama.configs.schema import ModelConfig, PipelineConfig
from infini_llama.configs.schema.runtime import RUN_NAME
from infini_llama.configs.variables import as_written
from infini_llama.model import hf
from infini_llama.model.config import Attention, LlamaConfig, parameters
from infini_llama.tasks.export.memory_recipe import to_learn_a_memory, to_read_text
from infini_llama.tasks.patch_environment.footprint import model_of
from infini_llama.tasks.records.heads import HeadScores
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.hf_folder import Folder, open_folder, tokenizer_of

log = logging.getLogger("infini_llama.export")

NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"  # OWNER/NAME
# Weights, configuration and tokenizer; never code or pickles.
FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.jinja",
]


def folder_of(model: str, revision: str | None) -> Path:
    """A folder as it is, or a model of the Hub, downloaded once.

    A token is taken from HF_TOKEN or `hf auth login`.

    Raises:
        ConfigError: the Hub has no such model or revision, does not give it to this account, or
            cannot be reached.
    """
    folder = expanded(model)
    if folder.exists() or not re.fullmatch(NAME, model):
        if revision is not None:
            raise ConfigError(
                f"--revision {revision} is for a model of the Hub, but {model} is a folder; "
                "remove it."
            )
        return folder
    about = f"{model}@{revision}" if revision else model
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=FILES))
    except GatedRepoError:
        raise ConfigError(
            f"{about} is gated: accept its terms on its page of the Hub, "
            "then run `hf auth login` or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(
            f"{model} has no revision {revision}; name a branch, tag or commit of it."
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(
            f"{model} is neither a folder here nor a model of the Hub that this account sees; "
            "correct the name, or set HF_TOKEN."
        ) from None
    except (
        OfflineModeIsEnabled,
        LocalEntryNotFoundError,
        HfHubHTTPError,
        OSError,
        # Of a proxy that the Hub's client cannot use.
        ImportError,
        ValueError,
    ) as error:
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{about} cannot be downloaded and is not complete in the local cache ({why}); "
            "check the network, its proxy and HF_HUB_OFFLINE, or name a folder."
        ) from None


# Decided by the run, not by the configuration's `model` section.
OF_THE_RUN = {"vocab_size", "max_position_embeddings"}
LONGEST_ROW = 2048  # to begin with; a Llama reads far more, at a price
SEGMENTS = 4  # in such a row, at least


class ImportedModel(Record):
    """The files that `infini-llama import` wrote.

    Attributes:
        digest: of the folder's configuration and weights.
        parameters: of the model that is trained.
        untrained_loss: nats per token of untrained weights, ln(vocabulary). The first loss of the
            run lies far below it.
    """

    config: Path
    folder: Path
    digest: str
    parameters: int
    attention: Attention
    untrained_loss: float


def write_configuration(
    folder: Folder,
    output: Path,
    attention: Attention | None = None,
    segment_length: int | None = None,
    heads: HeadScores | None = None,
    attend_previous_segment: bool = False,
) -> ImportedModel:
    """Write a configuration that trains from a folder's weights.

    Args:
        output: of `refuse_as_new`.
        attention: what takes the place of the folder's attention, None: nothing does.
        segment_length: of Infini-attention; None: the folder's, or a quarter of a row.
        heads: which of them get a memory; None, or if none retrieves: all.
        attend_previous_segment: let segments see the one before; else they do as in the folder,
            unless its attention is replaced.

    Raises:
        ConfigError: `segment_length` or `attend_previous_segment` is given for a model without
            segments.
    """
    chosen = architecture_of(
        folder.config, attention, segment_length, attend_previous_segment
    )
    mapping = configuration_of(folder, chosen, heads)
    if attend_previous_segment and folder.config.attention == "infini":
        mapping = to_read_text(mapping)
    elif chosen.attend_previous_segment:
        # What a memory holds is learned without it: there, the segments seen carry facts as well.
        log.info(
            "the configuration trains on text; a memory is learned in segments without it"
        )
    elif "memory_layers" in mapping["model"] and heads is not None:
        mapping = to_learn_a_memory(mapping, tokenizer_of(folder))
    if not re.fullmatch(RUN_NAME, output.stem):
        name = re.sub("[^A-Za-z0-9._-]+", "-", output.stem).strip("-._")
        mapping |= {"runtime": {"name": name or "run"}}
    config = parse_config({**mapping})
    trained = model_of(config.with_vocab_size(folder.config.vocab_size))
    digest = folder.digest()
    head = (
        f"# Continues training the model in {folder.path.name}, {digest}.\n"
        f"# Name your text in {key_of_text(config)}.\n"
    )
    # No list is in it twice: YAML would write a reference.
    plain = json.loads(json.dumps(mapping))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    output.write_text(head + text, encoding="utf-8")
    return ImportedModel(
        config=output,
        folder=folder.path,
        digest=digest,
        parameters=parameters(trained),
        attention=config.model.attention,
        untrained_loss=math.log(folder.config.vocab_size),
    )


def key_of_text(config: PipelineConfig) -> str:
    """The key at which a written configuration names the text."""
    return "files of data.sources" if config.data.sources else "data.files"


def open_model(path: Path) -> Folder:
    """The folder of a Llama and of its tokenizer, both checked.

    Raises:
        ConfigError: the model cannot be expressed here, or its tokenizer cannot be read.
        DataError: a file is missing or damaged.
    """
    folder = open_folder(path)
    tokenizer_of(folder)
    return folder


def parameters_of(folder: Folder) -> int:
    return sum(math.prod(shape) for shape in hf.shapes(folder.config).values())


def model_section(config: LlamaConfig) -> JsonObject:
    """The section `model` of a configuration: sizes, the attention, and what is not a default."""
    defaults = ModelConfig().model_dump()
    always = ("hidden_size", "intermediate", "num_")
    model: JsonObject = {}
    for name, value in config.to_dict().items():
        if name in OF_THE_RUN:
            continue
        if name.startswith(always) or name == "attention" or value != defaults[name]:
            model[name] = value
    return model


def architecture_of(
    chosen: LlamaConfig,
    attention: Attention | None,
    segment_length: int | None = None,
    attend_previous_segment: bool = False,
) -> LlamaConfig:
    """The architecture that is trained from a folder's, with the attention that is asked for.

    Args:
        chosen: of the folder.
    """
    if attention is not None and attention != chosen.attention:
        of_folder = chosen.segment_length
        if chosen.attention == "softmax":
            of_folder = max(1, longest_row(chosen) // SEGMENTS)
        chosen = replace(
            chosen,
            attention=attention,
            segment_length=of_folder,
            memory_layers=None,
            memory_maps=attention == "infini",
            attend_previous_segment=False,
        )
    for option, is_given in (
        ("--segment-length", segment_length is not None),
        ("--attend-previous-segment", attend_previous_segment),
    ):
        if is_given and chosen.attention == "softmax":
            raise ConfigError(
                f"{option} is for Infini-attention; add --attention infini, or remove it."
            )
    return replace(
        chosen,
        segment_length=chosen.segment_length
        if segment_length is None
        else segment_length,
        attend_previous_segment=attend_previous_segment
        or chosen.attend_previous_segment,
    )


def longest_row(config: LlamaConfig) -> int:
    """Tokens of the rows that training begins with."""
    return min(config.max_position_embeddings, LONGEST_ROW)


def configuration_of(
    folder: Folder,
    chosen: LlamaConfig,
    heads: HeadScores | None,
) -> dict[str, JsonObject]:
    """The configuration that trains from a folder's weights.

    It has the folder's tokenizer, and rates for weights that are trained already.

    Args:
        chosen: the architecture, of `architecture_of`.
    """
    length = longest_row(folder.config)
    if chosen.attention != "softmax":
        # No position is farther than a segment or two, so a row may be longer than the context.
        length = max(length, SEGMENTS * chosen.segment_length)
    if folder.untied:
        log.warning(
            "%s: config.json has tie_word_embeddings=true, but lm_head.weight has other values "
            "than the embedding; both are used, as in transformers 5 "
            "(model.tie_word_embeddings: false).",
            folder.path,
        )
    model = model_section(chosen)
    path = as_written(folder.path)
    tokenizer: JsonObject = {"path": path}
    data: JsonObject = {
        "source": "files",
        "files": ["texts/**/*.txt"],
        "sequence_length": length,
        "tokenizer": tokenizer,
    }
    train: JsonObject = {
        "init_from": path,
        "max_steps": 1000,
        "global_batch_size": 32,
        "micro_batch_size": 4,
        "learning_rate": 1e-4,
        "warmup_steps": 50,
    }
    keys = None if heads is None else heads.keys()
    if keys:
        model |= {"memory_layers": [*keys.memory_layers]}
        train |= {
            "init_gate": [[*gates] for gates in keys.init_gate],
            "frozen_layers": keys.frozen_layers,
        }
    return {"data": data, "model": model, "train": train}
