"""`infini-llama init`: a commented configuration for the user's text and this machine.

Its sizes follow from both. The model is new, or with --from one of the Hub or of a folder whose
training continues.
"""

import json
import logging
import math
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config, refuse_as_new
from infini_llama.configs.reading import parse_yaml
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.schema.runtime import RUN_NAME
from infini_llama.configs.text_formats import BY_ENDING
from infini_llama.configs.variables import without_variables
from infini_llama.flows.cli.console import Answer
from infini_llama.flows.cli.model_size import (
    MOST_EPOCHS,
    SIZES,
    TOKENS_PER_PARAMETER,
    Fitted,
    Overrides,
    affordable_flops,
    choose_size,
    fit_to_memory,
    plan_size,
)
from infini_llama.flows.cli.models import heads_to_read_memory
from infini_llama.flows.cli.tables import as_text
from infini_llama.flows.cli.text_sample import Text, sample_text
from infini_llama.flows.naming import home_folder
from infini_llama.model.config import Attention
from infini_llama.tasks.export.importing import (
    architecture_of,
    configuration_of,
    folder_of,
    open_model,
    parameters_of,
)
from infini_llama.tasks.formatting import in_bytes, in_millions
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.tokenizers.encoder import TextEncoder
from infini_llama.tasks.tokenizers.tokenizer import is_given, load

FREE_MEMORY = (
    "end other programs that hold its memory, "
    "or train on the CPU with CUDA_VISIBLE_DEVICES=''."
)
CONTINUED_BATCH = 2**19  # tokens per step at most, where training continues
COMMENTS_AT = 31  # column

log = logging.getLogger("infini_llama.init")


class WrittenConfig(Record):
    """The configuration that `init` wrote.

    Attributes:
        files, bytes, text_tokens: of the text, the tokens estimated from a sample.
        parameters, tokens: of the model, and seen in training.
        memory: bytes that a worker needs, by the estimate.
        warning: where there is too little text for the smallest model.
    """

    config: Path
    files: int
    bytes: int
    text_tokens: int
    device: str
    workers: int
    parameters: int
    tokens: int
    steps: int
    memory: int
    warning: str | None


def init(arguments: Namespace) -> Answer:
    output = Path(arguments.output)
    files = arguments.files
    model = vars(arguments)["from"]
    overrides = Overrides(
        tokens=arguments.tokens,
        parameters=arguments.parameters,
        hours=arguments.hours,
        text_column=arguments.text_column,
    )
    if model is not None:
        if overrides.parameters:
            raise ConfigError(
                f"--parameters: {model} has its own number; use --from or --parameters."
            )
        record = write_continuation(
            output, files, model, arguments.attention, home_folder(), overrides
        )
    else:
        record = write_new(
            output, files, arguments.attention or "softmax", home_folder(), overrides
        )
    if record.warning:
        log.warning(record.warning)
    shown = record.model_dump(mode="json", exclude={"warning"})
    text = as_text(shown | {"memory": f"{in_bytes(record.memory)} per worker"})
    return (
        record.to_json(),
        f"{text}\n\nread it, then: infini-llama run {shlex.quote(str(output))}",
    )


def write_new(
    output: Path,
    files: list[str],
    attention: str,
    home: Path,
    overrides: Overrides,
    machine: Machine | None = None,
) -> WrittenConfig:
    """Sample the text, probe the machine and write `output`.

    Raises:
        ConfigError: `output` exists, cannot be written, or its name is not that of a configuration
            and a run; or no model fits.
        DataError: no text is there, or too little.
    """
    _refuse(output)
    text = sample_text(files, home, overrides.text_column)
    facts = probe(home, machine=machine)
    planned = [
        plan_size(size, text.training_tokens, facts, home, overrides, attention)
        for size in SIZES
    ]
    fitting = [fitted for fitted in planned if fitted is not None]
    if not fitting:
        raise ConfigError(
            f"{_machine(facts)}: no model fits, not even {SIZES[0].layers} layers of width "
            f"{SIZES[0].hidden_size}; {FREE_MEMORY}"
        )
    chosen, why = choose_size(fitting, text.training_tokens, facts, overrides)
    comment = f"{in_millions(chosen.parameters)} parameters: {why}"
    return _write(output, chosen, text, facts, comment)


def write_continuation(
    output: Path,
    files: list[str],
    model: str,
    attention: Attention | None,
    home: Path,
    overrides: Overrides,
    machine: Machine | None = None,
) -> WrittenConfig:
    """Like `write_new`, for the weights of a Llama.

    The configuration has its architecture and tokenizer, and trains one epoch over the text.

    Args:
        model: OWNER/NAME on the Hugging Face Hub, or a folder.
        attention: what takes the place of the model's attention; None: nothing does.

    Raises:
        ConfigError, DataError: as `write_new`; or the Hub does not give the model, or its folder
            cannot be imported.
    """
    _refuse(output)  # before anything is downloaded
    folder = open_model(folder_of(model, None))
    heads = heads_to_read_memory(folder, attention)
    chosen = architecture_of(folder.config, attention)
    mapping: dict[str, Any] = {**configuration_of(folder, chosen, heads)}
    settings = without_variables(PipelineConfig.model_validate(mapping)).data.tokenizer
    encoder = None
    if is_given(settings):
        encoder = TextEncoder(load(settings), settings.split_special_tokens)
    text = sample_text(files, home, overrides.text_column, encoder)
    facts = probe(home, machine=machine)
    size = parameters_of(folder)
    tokens = overrides.tokens or min(
        text.training_tokens, int(affordable_flops(facts, overrides) / (6 * size))
    )
    fitted = fit_to_memory(
        mapping, folder.config.vocab_size, CONTINUED_BATCH, tokens, facts, home
    )
    if fitted is None:
        raise ConfigError(
            f"{_machine(facts)}: {model} with {in_millions(size)} parameters does not fit; "
            f"{FREE_MEMORY}"
        )
    untrained = math.log(folder.config.vocab_size)
    note = (
        "The learning rate is lower than for new weights. The loss of those is "
        f"{untrained:.2f} nats per token; the first loss must be far below."
    )
    origin = f"{model}: {in_millions(size)} parameters, {folder.digest()}"
    return _write(output, fitted, text, facts, origin, note)


def _refuse(output: Path) -> None:
    """Refuse a file that cannot be written, or whose name is not that of a run."""
    if not re.fullmatch(RUN_NAME, output.stem):
        raise ConfigError(
            f"{output}: the file's name is also the run's; use letters, digits, '.', '_' and '-'."
        )
    refuse_as_new(output)


def _write(
    output: Path,
    fitted: Fitted,
    text: Text,
    facts: MachineFacts,
    model: str,
    note: str | None = None,
) -> WrittenConfig:
    """Write the configuration.

    Args:
        model: the comment beside its section `model`.
        note: a sentence for the comment at its beginning.
    """
    path = shlex.quote(str(output))
    head = [
        f"Written by `infini-llama init` for {_machine(facts)} and about "
        f"{in_millions(text.tokens)} tokens of text.",
        f"Run it: infini-llama run {path}",
        f"Keys that are left out have their default. `infini-llama estimate {path}` prints memory "
        "and compute.",
    ]
    if note:
        head.append(note)
    sections = _sections(fitted, text, output.stem)
    comments = _comments(fitted, text) | {"model": model}
    lines = [*(f"# {line}" for line in head), *_lines(sections, comments)]
    content = "\n".join(lines) + "\n"
    parse_config(parse_yaml(content))
    output.write_text(content, encoding="utf-8")
    return WrittenConfig(
        config=output,
        files=len(text.files),
        bytes=sum(file.size() for file in text.files),
        text_tokens=text.tokens,
        device="gpu" if facts.gpus else "cpu",
        workers=fitted.workers,
        parameters=fitted.parameters,
        tokens=fitted.tokens,
        steps=fitted.steps,
        memory=fitted.memory,
        warning=_warning(text, fitted),
    )


def _comments(fitted: Fitted, text: Text) -> dict[str, str]:
    """The comments beside keys, by their dotted names."""
    divides = f"; {fitted.workers} GPUs divide it" if fitted.workers > 1 else ""
    return {
        "data.files": f"paths, folders or globs: {', '.join(BY_ENDING)}, also compressed",
        "data.sequence_length": "tokens per sequence",
        "data.validation_fraction": "fraction of documents to hold out",
        "data.validation_files": "held out, instead of a fraction of the files, which are few",
        "data.tokenizer.vocab_size": "learned from your text",
        "model.attention": "softmax; infini: local attention and a compressive memory",
        "model.segment_length": "tokens per segment (infini)",
        "train.max_steps": f"{in_millions(fitted.tokens)} tokens: "
        f"{fitted.tokens / text.training_tokens:.1f} epoch(s) over your text, "
        f"{fitted.tokens / fitted.parameters:.0f} tokens per parameter",
        "train.global_batch_size": "sequences per step: "
        f"{in_millions(fitted.batch * fitted.length)} tokens{divides}",
        "train.micro_batch_size": "sequences per forward pass and worker: as many as fit and help",
        **{f"train.{key}": "to fit into the memory" for key in fitted.saving},
        "train.eval_steps": "steps; an evaluation also writes a sample",
        "train.save_steps": "steps between checkpoints",
        "runtime.name": "the same name resumes the same run",
    }


def _lines(
    section: Mapping[str, Any], comments: Mapping[str, str], within: str = ""
) -> Iterator[str]:
    """The keys of a section in YAML, each with its comment, if it has one."""
    for key, value in section.items():
        if not within:
            yield ""
        name = within + key
        is_section = isinstance(value, dict)
        line = "  " * within.count(".") + (
            f"{key}:" if is_section else f"{key}: {_value(value)}"
        )
        yield f"{line:<{COMMENTS_AT}} # {comments[name]}" if name in comments else line
        if is_section:
            yield from _lines(value, comments, f"{name}.")


def _value(value: object) -> str:
    """A value on one line of YAML; text is quoted unless it is read as itself."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[\w./-]+", value) and parse_yaml(value) == value:
        return value
    return yaml.safe_dump(
        value, default_style='"', allow_unicode=True, width=math.inf
    ).strip()


def _machine(facts: MachineFacts) -> str:
    if not facts.gpus:
        return f"{facts.cores} CPU core(s)"
    memory = min(gpu.memory for gpu in facts.gpus) / 2**30
    return f"{len(facts.gpus)} GPU(s) {facts.gpus[0].name} with {memory:.0f} GiB"


def _warning(text: Text, chosen: Fitted) -> str | None:
    if text.only_document is not None:
        return (
            f"{text.only_document} is one document, and whole documents are held out; split it "
            "into several files, or name held-out text in data.validation_files."
        )
    is_new = "init_from" not in chosen.mapping["train"]
    if (
        is_new
        and TOKENS_PER_PARAMETER * chosen.parameters
        > MOST_EPOCHS * text.training_tokens
    ):
        need = TOKENS_PER_PARAMETER * chosen.parameters / MOST_EPOCHS
        return (
            f"about {in_millions(text.training_tokens)} tokens of training text are little for "
            f"{in_millions(chosen.parameters)} parameters, which learn from "
            f"{in_millions(need)} or more; the model will repeat your text rather than write its "
            "own."
        )
    return None


def _sections(fitted: Fitted, text: Text, name: str) -> dict[str, Any]:
    """The sections of the configuration of a run with this name."""
    size = {
        "max_steps": fitted.steps,
        "global_batch_size": fitted.batch,
        "micro_batch_size": "auto",
    }
    every = max(1, fitted.steps // 20)
    rest = {
        "warmup_steps": fitted.steps // 20,
        "eval_steps": every,
        "save_steps": every,
    }
    return {
        "data": fitted.mapping["data"]
        | {"files": text.patterns}
        | text.column
        | text.held_out(fitted.length),
        "model": fitted.mapping["model"],
        "train": fitted.mapping["train"] | size | fitted.saving | rest,
        "runtime": {"name": name},
    }
