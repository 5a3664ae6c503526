"""`infini-llama init`: a commented configuration for one's own text on this machine."""

import json
import logging
import re
import sys
from argparse import Namespace
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config, refuse_as_new
from infini_llama.configs.reading import parse_yaml
from infini_llama.configs.schema.runtime import RUN_NAME
from infini_llama.configs.schema.sources import TextConfig
from infini_llama.flows.cli.console import Answer
from infini_llama.flows.naming import home_folder
from infini_llama.tasks.patch_environment.probe.probe import probe
from infini_llama.tasks.preprocess.sources.formats import PLAIN, format_of
from infini_llama.tasks.preprocess.sources.sources import Source, sources
from infini_llama.tasks.records.record import Record

BYTES_PER_TOKEN, PASSES = 3.5, 3  # roughly, for English text and a vocabulary of 8192; passes over it that pay
TEMPLATE = """\
# Written by `infini-llama init` for {cores} CPU core(s) and {gpus} GPU(s). Run it: infini-llama run {output}
# Keys that are left out have their default. `infini-llama estimate {output}` prints memory and compute.
data:
  # paths, folders or globs, from where the command is called: txt, md, rst, py, json, jsonl, csv, parquet, also compressed
  files: {files}
  sequence_length: {length:<13}# tokens per sequence
  {held_out}
  tokenizer:
    vocab_size: 8192            # learned from your text

model:                          # about {size} million parameters
  hidden_size: {hidden}
  intermediate_size: {inner}
  num_hidden_layers: {layers}
  num_attention_heads: 8
  num_key_value_heads: 4
  attention: {attention:<19}# softmax; infini: local attention and a compressive memory
  segment_length: {segment:<14}# tokens per segment (infini)

train:
  max_steps: {steps:<19}# about {passes} epoch(s) over your text
  global_batch_size: {batch:<11}# sequences per step
  micro_batch_size: {micro:<12}# sequences per forward pass and worker
  learning_rate: {rate}
  warmup_steps: {warmup}
  eval_every: {every:<18}# steps; an evaluation also writes a sample
  save_every: {every:<18}# steps between checkpoints
  sample_prompt: "The "

runtime:
  name: {name:<24}# the same name resumes the same run
"""
# hidden, inner, layers, sequence length, batch, micro-batch, learning rate, millions of parameters
SIZES = {"cpu": (256, 768, 6, 512, 16, 8, 1.0e-3, 7), "gpu": (512, 1536, 8, 1024, 64, 16, 6.0e-4, 29)}


log = logging.getLogger("infini_llama.init")


class Beginning(Record):
    """The configuration that `init` wrote. files: how many there are; bytes: of text; warning: where there is too little of it."""

    config: Path
    files: int
    bytes: int
    device: str
    steps: int
    warning: str | None


def init(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import as_text

    files, attention = arguments.files, arguments.attention
    if not files:
        if not sys.stdin.isatty():
            raise ConfigError("init needs your text; name it with --files PATH.")
        files = [_ask("Where is your text (a folder, file or glob)?", "texts")]
        attention = attention or _ask("Attention: softmax, or infini with a memory?", "softmax")
    output = Path(arguments.output)
    record = write_beginning(output, files, output.stem, attention or "softmax", home_folder())
    if record.warning:
        log.warning(record.warning)
    text = as_text(record.model_dump(mode="json", exclude={"warning"}))
    return record.to_json(), f"{text}\n\nread it, then: infini-llama run {output}"


def _ask(question: str, default: str) -> str:
    print(f"{question} [{default}] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default


def write_beginning(output: Path, files: list[str], name: str, attention: str, home: Path) -> Beginning:
    """Survey the text, probe the machine and write `output`.

    Raises:
        ConfigError: `output` exists, cannot be written, or its name is not that of a configuration and a run.
        DataError: no text is there.
    """
    if not re.fullmatch(RUN_NAME, name):
        raise ConfigError(f"{output}: the file's name is also the run's; use letters, digits, '.', '_' and '-'.")
    refuse_as_new(output)
    found = sources(TextConfig(files=files))[0]
    size = sum(source.size() for source in found)
    facts = probe(home)
    device = "gpu" if facts.gpus else "cpu"
    hidden, inner, layers, length, batch, micro, rate, millions = SIZES[device]
    steps = min(20_000, max(200, int(PASSES * size / BYTES_PER_TOKEN / (batch * length))))
    passes = max(1, round(steps * batch * length * BYTES_PER_TOKEN / max(1, size)))
    text = TEMPLATE.format(
        cores=facts.cores, gpus=len(facts.gpus), output=output, files=json.dumps(files), length=length,
        held_out=_held_out(found, length), size=millions, hidden=hidden, inner=inner, layers=layers,
        attention=attention, segment=length // 4, steps=steps, passes=passes, batch=batch, micro=micro, rate=rate,
        warmup=steps // 20, every=steps // 20, name=json.dumps(name),
    )  # fmt: skip
    parse_config(parse_yaml(text))
    output.write_text(text, encoding="utf-8")
    warning = None
    if size < 4 * length * BYTES_PER_TOKEN:  # a few rows, some of them held out
        warning = f"{size:,} bytes are too little text: one row of data.sequence_length={length} takes about " \
                  f"{length * BYTES_PER_TOKEN:,.0f}; name more files, or lower it."  # fmt: skip
    elif len(found) == 1 and _is_one_text(found[0]):
        warning = f"{found[0]} is one document, and whole documents are held out; split it into several files, or " \
                  "name held-out text in data.validation_files."  # fmt: skip
    return Beginning(config=output, files=len(found), bytes=size, device=device, steps=steps, warning=warning)


def _held_out(found: list[Source], length: int) -> str:
    """The line of the held-out text: of a few files of one document each, a fraction may hold out none."""
    few = len(found) < 20 and all(map(_is_one_text, found))
    if len(found) < 2 or not few:
        return f"validation_fraction: {0.05 if len(found) >= 40 else 0.2:<9}# fraction of documents to hold out"
    by_size = sorted(found, key=lambda source: source.size())
    chosen = next((source for source in by_size if source.size() > 2 * length * BYTES_PER_TOKEN), by_size[-1])
    return f"# held out, instead of a fraction of the files, which are few\n  validation_files: {json.dumps([str(chosen)])}"


def _is_one_text(source: Source) -> bool:
    return (format_of(source.path.name) or PLAIN[0]) in PLAIN
