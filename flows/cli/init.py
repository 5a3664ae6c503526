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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.loading import parse_config, refuse_as_new
from infini_llama.configs.reading import parse_yaml
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.schema.runtime import RUN_NAME
from infini_llama.configs.schema.sources import TextConfig
from infini_llama.configs.text_formats import BY_ENDING
from infini_llama.flows.cli.console import Answer
from infini_llama.flows.cli.models import heads_to_read_memory
from infini_llama.flows.cli.tables import as_text
from infini_llama.flows.naming import home_folder
from infini_llama.model.config import Attention, parameters
from infini_llama.tasks.export.importing import (
    architecture_of,
    configuration_of,
    folder_of,
    open_model,
    parameters_of,
)
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.footprint import (
    bytes_of_plan,
    describe,
    fits,
    memory_per_worker,
    model_of,
)
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.preprocess.sources.files import File, Files, matching
from infini_llama.tasks.preprocess.sources.formats import format_read
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.source import TextInput
from infini_llama.tasks.preprocess.sources.texts import Fault, Unreadable
from infini_llama.tasks.records.machine import Gpu, MachineFacts
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.tokenizers.encoder import TextEncoder
from infini_llama.tasks.tokenizers.tokenizer import is_given, load

BYTES_PER_TOKEN = 3.5  # roughly, for English text and a learned vocabulary
ENCODED_BYTES = 2**18  # of each sampled file, where the tokenizer is known
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv 2203.15556
MOST_EPOCHS = 4  # Muennighoff et al. 2023, arXiv 2305.16264
# How many files, and bytes of text in each, are read to estimate how much text a byte of a file
# holds.
SAMPLED_FILES = 8
SAMPLED_BYTES = 4 * 2**20
# Less text than this many sequences of this many tokens is refused.
FEWEST_SEQUENCES = 16
SHORTEST = 128
FEWEST_STEPS = 200
FREE_MEMORY = (
    "end other programs that hold its memory, "
    "or train on the CPU with CUDA_VISIBLE_DEVICES=''."
)
CONTINUED_BATCH = 2**19  # tokens per step at most, where training continues
HOURS = 24.0
# Assumed FLOP/s of training, for the limit of hours alone: per GPU by its compute capability, per
# core of a CPU.
GPU_SPEED = {(9, 0): 300e12, (8, 9): 60e12, (8, 0): 120e12, (0, 0): 20e12}
CORE_SPEED = 30e9
# Ways to need less memory, from the fastest to the smallest.
SAVING: tuple[dict[str, str], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "parallel": "fsdp"},
)


@dataclass(frozen=True)
class Size:
    """A model that is known to train well, and how.

    Attributes:
        length: tokens per sequence.
        batch: tokens per step.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    vocab_size: int
    length: int
    batch: int
    learning_rate: float


SIZES = (
    Size(128, 384, 4, 4, 2, 4096, 256, 2**13, 1.5e-3),
    Size(256, 768, 6, 8, 4, 8192, 512, 2**13, 1.0e-3),
    Size(512, 1536, 8, 8, 4, 8192, 1024, 2**16, 6.0e-4),
    Size(768, 2048, 12, 12, 12, 32768, 1024, 2**18, 6.0e-4),
    Size(1024, 3072, 24, 16, 8, 50304, 1024, 2**18, 3.0e-4),
    Size(1536, 5120, 24, 16, 8, 50304, 2048, 2**19, 2.5e-4),
    Size(2560, 8192, 32, 20, 10, 50304, 2048, 2**20, 2.0e-4),
    Size(4096, 11008, 32, 32, 8, 50304, 4096, 2**21, 1.5e-4),
)
COMMENTS_AT = 31  # column

log = logging.getLogger("infini_llama.init")


class WrittenConfig(Record):
    """The configuration that `init` wrote.

    Attributes:
        files, bytes, text_tokens: of the text, the tokens estimated from a sample.
        parameters, tokens: of the model, and seen in training.
        memory: of one worker, by the estimate.
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
    memory: str
    warning: str | None


@dataclass(frozen=True)
class Overrides:
    """Settings of the command line in place of a rule or a default.

    Attributes:
        hours: at an assumed speed of this machine.
        text_column: field or column with the text.
    """

    tokens: int | None = None
    parameters: int | None = None
    hours: float | None = None
    text_column: str | None = None


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
    text = as_text(record.model_dump(mode="json", exclude={"warning"}))
    return (
        record.to_json(),
        f"{text}\n\nread it, then: infini-llama run {shlex.quote(str(output))}",
    )


def write_new(
    output: Path,
    files: list[str],
    attention: str,
    home: Path,
    overrides: Overrides = Overrides(),
    machine: Machine | None = None,
) -> WrittenConfig:
    """Sample the text, probe the machine and write `output`.

    Raises:
        ConfigError: `output` exists, cannot be written, or its name is not that of a configuration
            and a run; or no model fits.
        DataError: no text is there, or too little.
    """
    _refuse(output)
    text, facts = _sampled(files, home, machine, overrides.text_column)
    planned = [
        _planned(size, text.tokens, facts, home, overrides, attention) for size in SIZES
    ]
    fitting = [fitted for fitted in planned if fitted is not None]
    if not fitting:
        raise ConfigError(
            f"{_machine(facts)}: no model fits, not even {SIZES[0].layers} layers of width "
            f"{SIZES[0].hidden_size}; {FREE_MEMORY}"
        )
    chosen, why = _choose(fitting, text.tokens, facts, overrides)
    comment = f"{_count(chosen.parameters)} parameters: {why}"
    return _write(output, chosen, text, facts, comment)


def write_continuation(
    output: Path,
    files: list[str],
    model: str,
    attention: Attention | None,
    home: Path,
    overrides: Overrides = Overrides(),
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
    settings = PipelineConfig.model_validate(mapping).data.tokenizer
    encoder = None
    if is_given(settings):
        encoder = TextEncoder(load(settings), settings.split_special_tokens)
    text, facts = _sampled(files, home, machine, overrides.text_column, encoder)
    size = parameters_of(folder)
    tokens = overrides.tokens or min(
        text.tokens, int(_affordable(facts, overrides) / (6 * size))
    )
    fitted = _fitted(
        mapping, folder.config.vocab_size, CONTINUED_BATCH, tokens, facts, home
    )
    if fitted is None:
        raise ConfigError(
            f"{_machine(facts)}: {model} with {_count(size)} parameters does not fit; {FREE_MEMORY}"
        )
    untrained = math.log(folder.config.vocab_size)
    note = (
        "The learning rate is lower than for new weights. The loss of those is "
        f"{untrained:.2f} nats per token; the first loss must be far below."
    )
    origin = f"{model}: {_count(size)} parameters, {folder.digest()}"
    return _write(output, fitted, text, facts, origin, note)


@dataclass(frozen=True)
class Text:
    """The user's text.

    Attributes:
        patterns: as given with --files.
        tokens: estimated from a sample.
        column: the key data.text_column, if it was given.
    """

    patterns: list[str]
    files: list[File]
    tokens: int
    column: dict[str, str]


def _refuse(output: Path) -> None:
    """Refuse a file that cannot be written, or whose name is not that of a run."""
    if not re.fullmatch(RUN_NAME, output.stem):
        raise ConfigError(
            f"{output}: the file's name is also the run's; use letters, digits, '.', '_' and '-'."
        )
    refuse_as_new(output)


def _sampled(
    patterns: list[str],
    home: Path,
    machine: Machine | None,
    text_column: str | None,
    encoder: TextEncoder | None = None,
) -> tuple[Text, MachineFacts]:
    """The text, whose tokens are counted by the encoder where it is known, and the machine."""
    column = {"text_column": text_column} if text_column else {}
    source = Files(TextConfig.model_validate({"files": patterns, **column}), "data")
    files = matching(source, patterns, "files", NotText(home))
    tokens = sampled_tokens(files, encoder)
    if tokens < FEWEST_SEQUENCES * SHORTEST:
        raise _too_little_text(files, tokens)
    return Text(patterns, files, tokens, column), probe(home, machine=machine)


def _too_little_text(files: Sequence[File], tokens: int) -> DataError:
    """The error for so few tokens; it names what is wrong with the first file, if anything is."""
    fault = ""
    cure = "name more text"
    if files:
        reason = _first_fault(files[0])
        fault = f" ({files[0]} {reason})" if reason else ""
    if not all(map(_is_one_document, files)):
        cure += ", or with --text-column NAME the field or column that has the text"
    return DataError(
        f"--files: about {tokens:,} tokens of text in {len(files)} file(s){fault}; the smallest "
        f"model needs {FEWEST_SEQUENCES * SHORTEST:,} to learn anything; {cure}."
    )


def _first_fault(file: File) -> str | None:
    """The reason why the file's first record is no text; None: it is text, or cannot be read."""
    try:
        first = next(file.records(), None)
    except Unreadable as fault:
        return str(fault)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return first.reason if isinstance(first, Fault) else None


def _write(
    output: Path,
    fitted: "Fitted",
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
        f"Written by `infini-llama init` for {_machine(facts)} and about {_count(text.tokens)} "
        "tokens of text.",
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


def _comments(fitted: "Fitted", text: Text) -> dict[str, str]:
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
        "train.max_steps": f"{_count(fitted.tokens)} tokens: "
        f"{fitted.tokens / text.tokens:.1f} epoch(s) over your text, "
        f"{fitted.tokens / fitted.parameters:.0f} tokens per parameter",
        "train.global_batch_size": "sequences per step: "
        f"{_count(fitted.batch * fitted.length)} tokens{divides}",
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


def sampled_tokens(
    files: Sequence[TextInput], encoder: TextEncoder | None = None
) -> int:
    """Tokens in these files, estimated from the text in some whole files of them.

    The tokens are counted by the encoder, where it is known.
    """
    # Bytes of files that were read as a whole, and of the text in them.
    read = 0
    text = 0
    # Bytes of text that the tokenizer encoded, and their tokens.
    encoded = 0
    tokens = 0
    every = max(1, math.ceil(len(files) / SAMPLED_FILES))
    for file in files[::every]:
        file_text = 0
        try:
            for record in file.records():
                record = record if isinstance(record, str) else ""
                if encoder is not None and file_text < ENCODED_BYTES:
                    sample = record[:ENCODED_BYTES]
                    encoded += len(sample.encode())
                    tokens += len(encoder.encode(sample))
                file_text += len(record.encode())
                if file_text > SAMPLED_BYTES:
                    break
            else:
                read += file.size()
                text += file_text
        except (Unreadable, OSError):  # preprocess names it
            continue
    bytes_per_token = encoded / tokens if tokens else BYTES_PER_TOKEN
    text_per_byte = text / read if read else 1.0
    return int(sum(file.size() for file in files) * text_per_byte / bytes_per_token)


@dataclass(frozen=True)
class Fitted:
    """A configuration, and how it is trained on this machine.

    Attributes:
        mapping: its sections data, model and train, without what follows.
        batch: sequences per step.
        saving: settings that need less memory.
    """

    mapping: dict[str, Any]
    parameters: int
    tokens: int
    length: int
    batch: int
    steps: int
    workers: int
    memory: str
    saving: dict[str, str]


def _planned(
    size: Size,
    text: int,
    facts: MachineFacts,
    home: Path,
    overrides: Overrides,
    attention: str,
) -> Fitted | None:
    """A new model of this size with its length, batch and steps.

    Returns:
        None: it does not fit into the machine's memory.
    """
    length = min(size.length, max(SHORTEST, 2 ** int(math.log2(text / 64))))
    mapping: dict[str, Any] = {
        "data": {
            "files": ["x"],
            "sequence_length": length,
            "tokenizer": {"vocab_size": size.vocab_size},
        },
        "model": {
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.key_value_heads,
            "attention": attention,
            "segment_length": length // 4,
        },
        "train": {"learning_rate": size.learning_rate},
    }
    total = parameters(model_of(PipelineConfig.model_validate(mapping)))
    tokens = overrides.tokens
    if not tokens:
        enough = min(max(TOKENS_PER_PARAMETER * total, text), MOST_EPOCHS * text)
        tokens = min(enough, int(_affordable(facts, overrides) / (6 * total)))
    return _fitted(mapping, size.vocab_size, size.batch, tokens, facts, home)


def _fitted(
    mapping: dict[str, Any],
    vocabulary: int,
    most_per_step: int,
    tokens: int,
    facts: MachineFacts,
    home: Path,
) -> Fitted | None:
    """Batch, steps and what saves memory for a configuration.

    Args:
        most_per_step: tokens of a step at most; with few tokens in all, a step has fewer, so that
            there are enough steps.
        tokens: of the whole training.

    Returns:
        None: it does not fit into the machine's memory.
    """
    length = mapping["data"]["sequence_length"]
    gpus = max(1, len(facts.gpus))
    per_step = min(most_per_step, max(gpus * length, tokens // FEWEST_STEPS))
    batch = gpus * 2 ** max(0, round(math.log2(per_step / length / gpus)))
    for saving in SAVING if gpus > 1 else SAVING[:-1]:
        train = mapping["train"] | {
            "global_batch_size": batch,
            "micro_batch_size": "auto",
            **saving,
        }
        config = PipelineConfig.model_validate(
            mapping | {"train": train, "runtime": {"home": home}}
        )
        config = config.with_vocab_size(vocabulary)
        plan = plan_environment(config, facts)
        need = bytes_of_plan(config, plan)
        have = memory_per_worker(facts, plan.gpus, plan.nproc_per_node)
        if fits(need, have):
            steps = max(20, tokens // (batch * length))
            return Fitted(
                mapping=mapping,
                parameters=parameters(model_of(config)),
                tokens=steps * batch * length,
                length=length,
                batch=batch,
                steps=steps,
                workers=plan.nproc_per_node,
                memory=describe(need, have),
                saving=saving,
            )
    return None


def _choose(
    fitting: list[Fitted], text: int, facts: MachineFacts, overrides: Overrides
) -> tuple[Fitted, str]:
    """The size to train, and the reason."""
    if parameters := overrides.parameters:
        nearest = min(
            fitting, key=lambda plan: abs(math.log(plan.parameters / parameters))
        )
        return nearest, f"the nearest to {_count(parameters)}"
    tokens = overrides.tokens or MOST_EPOCHS * text
    enough = [
        plan for plan in fitting if TOKENS_PER_PARAMETER * plan.parameters <= tokens
    ]
    enough = enough or fitting[:1]
    timely = enough
    if overrides.tokens is None or overrides.hours:
        flops = _affordable(facts, overrides)
        timely = [
            plan
            for plan in enough
            if 6 * TOKENS_PER_PARAMETER * plan.parameters**2 <= flops
        ]
    chosen = (timely or enough[:1])[-1]
    if chosen is fitting[-1] and len(fitting) < len(SIZES):
        return chosen, "the largest that fits into the memory"
    if TOKENS_PER_PARAMETER * chosen.parameters > tokens:
        return chosen, "the smallest, since there is little text"
    if len(timely) < len(enough):
        return chosen, (
            f"what trains in {overrides.hours or HOURS:g} hours at an assumed speed; "
            "--hours changes it"
        )
    epochs = "" if overrides.tokens else f", from at most {MOST_EPOCHS} epochs"
    return chosen, f"{TOKENS_PER_PARAMETER} tokens per parameter{epochs}"


def _affordable(facts: MachineFacts, overrides: Overrides) -> float:
    """FLOPs of the hours, at an assumed speed."""
    speed = (
        sum(map(_speed, facts.gpus)) if facts.gpus else CORE_SPEED * max(1, facts.cores)
    )
    return 3600 * (overrides.hours or HOURS) * speed


def _speed(gpu: Gpu) -> float:
    return next(
        speed for capability, speed in GPU_SPEED.items() if gpu.capability >= capability
    )


def _machine(facts: MachineFacts) -> str:
    if not facts.gpus:
        return f"{facts.cores} CPU core(s)"
    memory = min(gpu.memory for gpu in facts.gpus) / 2**30
    return f"{len(facts.gpus)} GPU(s) {facts.gpus[0].name} with {memory:.0f} GiB"


def _count(number: float) -> str:
    """1.2 million, 340 million, 7.1 billion; small numbers in full."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.{0 if number >= 10 * unit else 1}f} {name}"
    return f"{number:,.0f}"


def _warning(text: Text, chosen: Fitted) -> str | None:
    if len(text.files) == 1 and _is_one_document(text.files[0]):
        return (
            f"{text.files[0]} is one document, and whole documents are held out; split it into "
            "several files, or name held-out text in data.validation_files."
        )
    is_new = "init_from" not in chosen.mapping["train"]
    if is_new and TOKENS_PER_PARAMETER * chosen.parameters > MOST_EPOCHS * text.tokens:
        need = TOKENS_PER_PARAMETER * chosen.parameters / MOST_EPOCHS
        return (
            f"about {_count(text.tokens)} tokens are little text for {_count(chosen.parameters)} "
            f"parameters, which learn from {_count(need)} or more; the model will repeat your text "
            "rather than write its own."
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
    held_out = _held_out(text.files, fitted.length)
    return {
        "data": fitted.mapping["data"]
        | {"files": text.patterns}
        | text.column
        | held_out,
        "model": fitted.mapping["model"],
        "train": fitted.mapping["train"] | size | fitted.saving | rest,
        "runtime": {"name": name},
    }


def _held_out(files: list[File], length: int) -> dict[str, object]:
    """The key for held-out text.

    A fraction of a few files of one document each may hold out none.
    """
    few = len(files) < 20 and all(map(_is_one_document, files))
    if len(files) < 2 or not few:
        return {"validation_fraction": 0.05 if len(files) >= 100 else 0.2}
    by_size = sorted(files, key=lambda file: file.size())
    chosen = next(
        (file for file in by_size if file.size() > 2 * length * BYTES_PER_TOKEN),
        by_size[-1],
    )
    return {"validation_files": [str(chosen.path)]}


def _is_one_document(file: File) -> bool:
    return format_read(file.path, file.format).is_document
