"""The commands generate, evaluate, heads, export and import."""

from __future__ import annotations

import logging
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from infini_llama.configs.errors import ConfigError, escaped
from infini_llama.configs.pointers import refuse_pointer
from infini_llama.flows.cli.console import Answer
from infini_llama.flows.cli.tables import (
    as_text,
    evaluation_text,
    heads_text,
    passkey_text,
)
from infini_llama.flows.naming import find

if TYPE_CHECKING:
    from infini_llama.tasks.records.heads import HeadScores
    from infini_llama.tasks.storage.hf_folder import Folder

# Options of `evaluate --passkey`.
PASSKEY = ("lengths", "depths", "segments", "form", "filler", "samples", "seed")
log = logging.getLogger("infini_llama.export")


def generate(arguments: Namespace) -> Answer:
    run = find(arguments.run, "runs")  # before the imports, which take seconds
    files = [prompt_of(file) for file in arguments.prompt_file]
    if not arguments.prompt and not files:
        raise ConfigError(
            "generate needs a prompt; give --prompt TEXT or --prompt-file FILE "
            "(both can be repeated)."
        )
    for prompt in arguments.prompt:
        # Python decodes bytes of an argument that are no UTF-8 as surrogates.
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ConfigError(
                f"--prompt {prompt} is not UTF-8 text; convert it, or give it in a --prompt-file."
            )
    from infini_llama.model.generate import Sampling
    from infini_llama.tasks.runs.generation import Writer, warn_beyond_trained_length
    from infini_llama.tasks.runs.load import end_tokens_of, load_run
    from infini_llama.tasks.runs.reading import reading_of

    reading = reading_of(run)
    prompts = [*arguments.prompt, *map(reading.prompt_in_file, files)]
    encoded = [*map(reading.encoder.encode, prompts)]
    model, tokenizer, _ = load_run(run, arguments.checkpoint)
    model.use_memory(not arguments.no_memory)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = Sampling(**{name: getattr(arguments, name) for name in names})
    writer = Writer(
        model, tokenizer, encoded, end_tokens_of(run), tuple(arguments.stop)
    )
    warn_beyond_trained_length(run, writer, arguments.max_new_tokens)
    single = len(prompts) == 1 and not arguments.json
    if single:
        print(escaped(prompts[0]), end="", flush=True)
    for _, piece in writer.write(arguments.max_new_tokens, sampling):
        if single:  # several texts grow at once, so they are printed when complete
            print(escaped(piece), end="", flush=True)
    written = list(zip(prompts, writer.texts, writer.tokens, strict=True))
    texts: list[JsonValue] = [
        {"prompt": prompt, "text": text, "tokens": [*tokens]}
        for prompt, text, tokens in written
    ]
    if single:
        print(flush=True)
        return {"texts": texts}, ""
    numbered = [
        f"[{i}] {prompt}{text}" for i, (prompt, text, _) in enumerate(written, 1)
    ]
    return {"texts": texts}, "\n\n".join(numbered)


def prompt_of(file: str) -> str:
    """The text of a file as it is; see `Reading.prompt_in_file`."""
    refuse_pointer(Path(file))
    try:
        return Path(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompt-file {file} cannot be read as UTF-8 text: {error}"
        ) from error


def evaluate(arguments: Namespace) -> Answer:
    if arguments.passkey:
        return _passkey(arguments)
    _refuse(arguments, PASSKEY, "only with --passkey; use both or neither.")
    if arguments.files:
        _refuse(
            arguments,
            ("split", "sequences"),
            "not with --files, which is read whole; remove them.",
        )
    run = find(arguments.run, "runs")
    if arguments.stream and not arguments.files:
        raise ConfigError("--stream needs --files: it reads each file as one text.")
    if arguments.source and not arguments.files:
        raise ConfigError(
            "--source needs --files, which are read as that source of the run is."
        )
    from infini_llama.tasks.evaluate.stage import evaluate as evaluate_run
    from infini_llama.tasks.evaluate.stage import evaluate_files

    checkpoint = arguments.checkpoint
    if arguments.files:
        record = evaluate_files(
            run, arguments.files, checkpoint, arguments.source, arguments.stream
        )
    else:
        split = arguments.split or "validation"
        record = evaluate_run(run, checkpoint, split, arguments.sequences)
    return record.to_json(), evaluation_text(record)


def _refuse(arguments: Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse the options of these names that were given."""
    options = [f"--{name}" for name in names if _is_given(getattr(arguments, name))]
    if options:
        raise ConfigError(f"{', '.join(options)}: {reason}")


def _is_given(value: object) -> bool:
    """Whether this is the value of an option that was given; 0 is one."""
    return value is not None and value is not False and value != []


def _passkey(arguments: Namespace) -> Answer:
    perplexity = ("split", "sequences", "stream")
    _refuse(
        arguments,
        perplexity,
        "not with --passkey, which makes its own texts; remove them.",
    )
    if not arguments.files:
        _refuse(
            arguments,
            ("source",),
            "with --passkey only with --files; use both or neither.",
        )
    run = find(arguments.run, "runs")
    if arguments.files:
        reason = "not with --passkey and --files, which asks after --lengths tokens; remove them."
        _refuse(arguments, ("segments", "filler", "depths"), reason)
    elif not arguments.segments and (arguments.form or arguments.filler):
        raise ConfigError("--form and --filler need --segments; use both or neither.")
    if arguments.segments:
        reason = "not with --segments, which decides length and place; remove them."
        _refuse(arguments, ("lengths", "depths"), reason)
    from infini_llama.tasks.evaluate.passkey import HiddenFacts
    from infini_llama.tasks.evaluate.stage import (
        DEPTHS,
        SAMPLES,
        find_passkeys,
        find_passkeys_across,
        find_passkeys_after,
    )

    checkpoint = arguments.checkpoint
    samples = arguments.samples or SAMPLES
    seed = arguments.seed or 0
    lengths = arguments.lengths or ()
    facts = HiddenFacts(form=arguments.form or "passkey", samples=samples, seed=seed)
    if arguments.files:
        record = find_passkeys_after(
            run, arguments.files, checkpoint, arguments.source, lengths, facts
        )
    elif arguments.segments:
        filler = arguments.filler or "repeated"
        record = find_passkeys_across(
            run, checkpoint, arguments.segments, facts, filler
        )
    else:
        depths = arguments.depths or DEPTHS
        record = find_passkeys(run, checkpoint, lengths, depths, samples, seed)
    return record.to_json(), passkey_text(record)


def heads(arguments: Namespace) -> Answer:
    picture = Path(arguments.picture) if arguments.picture else None
    if picture and picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture {picture} must end with .png or .svg.")
    if picture and not picture.parent.is_dir():
        raise ConfigError(
            f"--picture {picture}: {picture.parent} is not a folder; make it, or name another file."
        )
    from infini_llama.tasks.evaluate.heads import measure_heads, save_picture
    from infini_llama.tasks.export.importing import folder_of, open_model

    folder = open_model(folder_of(arguments.model, arguments.revision))
    scores = measure_heads(folder, arguments.seed)
    if picture:
        save_picture(scores, picture)
    record = scores.to_json()
    if keys := scores.keys():
        record["keys"] = keys.to_json()
    return record, heads_text(scores)


def heads_to_read_memory(folder: Folder, attention: str | None) -> HeadScores | None:
    """Scores of the heads of a model with full attention that is to get a memory.

    Returns:
        None: the model is not one of these, or this machine's memory does not hold it.
    """
    if attention != "infini" or folder.config.attention != "softmax":
        return None
    from infini_llama.tasks.evaluate.heads import measure_heads
    from infini_llama.tasks.export.importing import parameters_of
    from infini_llama.tasks.machine import Machine, memory

    need = 5 * parameters_of(folder)  # bytes: fp32, and what one layer computes
    have = memory(Machine()).available
    if need > have:
        log.warning(
            "which heads retrieve is not measured: it takes %.0f GB of memory, and %.0f GB are "
            "available. All layers get a memory; run `infini-llama heads` on a larger machine",
            need / 1e9,
            have / 1e9,
        )
        return None
    log.info("measuring which heads of %s retrieve", folder.path)
    scores = measure_heads(folder, seed=0)
    if scores.keys() is None:
        log.warning(
            "no head of %s can learn to read a memory: it found %d of %d numbers with full "
            "attention. All layers get a memory",
            folder.path,
            scores.found,
            scores.texts,
        )
    return scores


def export(arguments: Namespace) -> Answer:
    run = find(arguments.run, "runs")
    from infini_llama.tasks.export.exporting import export as export_run

    record = export_run(
        run,
        Path(arguments.output),
        arguments.checkpoint,
        arguments.dtype,
        arguments.max_shard_size,
    )
    if record.custom_code:
        log.warning(
            "Hugging Face's Llama does not have %s: the folder contains the model's code "
            "(trust_remote_code=True).",
            ", ".join(record.custom_code),
        )
    return record.to_json(), as_text(record.to_json())


def import_folder(arguments: Namespace) -> Answer:
    from infini_llama.configs.loading import load_config, refuse_as_new
    from infini_llama.configs.schema.tokenizer import TokenizerConfig
    from infini_llama.flows.naming import config_of_run
    from infini_llama.tasks.estimate.run import estimate
    from infini_llama.tasks.export.importing import (
        folder_of,
        key_of_text,
        open_model,
        write_configuration,
    )
    from infini_llama.tasks.formatting import in_bytes, in_words
    from infini_llama.tasks.tokenizers.tokenizer import load

    path = folder_of(arguments.model, arguments.revision)
    output = Path(arguments.output or f"{Path(arguments.model).resolve().name}.yaml")
    refuse_as_new(output)  # before anything that takes long
    folder = open_model(path)
    # The whole check of a tokenizer, before any text is read.
    load(TokenizerConfig(path=str(folder.path)))
    read_memory = heads_to_read_memory(folder, arguments.attention)
    imported = write_configuration(
        folder,
        output,
        arguments.attention,
        arguments.segment_length,
        read_memory,
        arguments.attend_previous_segment,
    )
    config = load_config(output)
    memory = estimate(config_of_run(config))[1].memory["total"]
    record = imported.to_json() | {"memory": memory}
    shown = record | {
        "memory": f"{in_bytes(memory)} per worker",
        "untrained_loss": f"{imported.untrained_loss:.2f} nats per token; the first loss of these "
        "weights must be far below, usually 2 to 4",
    }
    then = (
        f"name your text in {output} ({key_of_text(config)}), then: "
        f"infini-llama run {shlex.quote(str(output))}"
    )
    return record, f"{as_text(in_words(shown))}\n\n{then}"
