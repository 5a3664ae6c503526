"""Measurement of a trained model, for `infini-llama evaluate` and after training.

Results are also kept in the run's folder.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import DataConfig, EvaluationConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.evaluate.files import prepared, section_of, with_all_targets
from infini_llama.tasks.evaluate.passkey import (
    HiddenFacts,
    in_text,
    least_length,
    passkey,
    passkey_across,
    passkey_after,
    refuse_other_updates,
    with_and_without_memory,
)
from infini_llama.tasks.evaluate.perplexity import (
    Measured,
    over_documents,
    over_rows,
    part_of,
)
from infini_llama.tasks.preprocess.sources.passkey import FILLER, random_words
from infini_llama.tasks.preprocess.sources.sources import sections
from infini_llama.tasks.preprocess.tokens.reader import TokenReader, WindowRows
from infini_llama.tasks.records.evaluation import (
    Evaluated,
    EvaluationRequest,
    Evaluations,
    PasskeyResult,
    PasskeyRetrieval,
    Perplexity,
)
from infini_llama.tasks.records.metrics import (
    EVALUATION_LINE,
    EvaluationLine,
    PerplexityLine,
)
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.load import (
    dataset_of,
    end_of_text_of,
    find_checkpoint,
    load_run,
)
from infini_llama.tasks.runs.reading import reading_of
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    Damaged,
    read_dataset,
    read_manifest,
    read_row_table,
)
from infini_llama.tasks.storage.dataset_files import repairable
from infini_llama.tasks.storage.record_files import append_line, read_lines
from infini_llama.tasks.tokenizers.encoder import TextEncoder

log = logging.getLogger("infini_llama.evaluate")
# Tokens that filler has before it repeats; of held-out text, at least.
MOST_FILLER = 100_000
# Segments that a text may have beside those between what is hidden and the answer.
EXTRA_SEGMENTS = 8
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES = 10  # per length and depth


def evaluate(
    run_dir: Path,
    checkpoint: str = "latest",
    split: str = "validation",
    sequences: int | None = None,
    request: EvaluationRequest | None = None,
) -> Perplexity:
    """Perplexity and bits per byte of a run's model over a split of its dataset.

    For Infini-attention they are measured with and without its memory.

    Args:
        split: train or validation.
        sequences: number of sequences of it; None: all.
        request: stored with the result, so that the last stage of a run finds it again.

    Raises:
        ConfigError: no such run or checkpoint.
        DataError: dataset or checkpoint are damaged or missing.
    """
    model, about = _open(run_dir, checkpoint, request is not None)
    reader = verified_reader(run_dir, split)
    isolate = RunFolder(run_dir).require_lineage().train.document_masking
    read = partial(repairable()(over_rows), model, reader, sequences, isolate)
    text = f"{split} rows of {dataset_of(run_dir).name}"
    return _perplexity(run_dir, about, text, model, read, request)


def evaluate_files(
    run_dir: Path,
    files: list[str],
    checkpoint: str = "latest",
    source: str | None = None,
    stream: bool = False,
) -> Perplexity:
    """Perplexity and bits per byte over other files, prepared as the run's held-out text is.

    Args:
        files: in the forms of data.files.
        source: the one of the run's sources as which the files are read; None: they are read alike.
        stream: read each text by itself, in constant state, not in rows of the length that was
            trained.

    Raises:
        ConfigError: as `evaluate`; or there is no such source, or the model cannot stream.
        DataError: as `evaluate`, also for the files.
    """
    model, about = _open(run_dir, checkpoint, is_stage=False)
    isolate = RunFolder(run_dir).require_lineage().train.document_masking
    with prepared_for_run(run_dir, files, source) as reader:
        read = partial(over_rows, model, reader, None, isolate)
        if stream:
            read = partial(over_documents, model, reader)
        return _perplexity(run_dir, about, tuple(files), model, read, None, stream)


@contextmanager
def prepared_for_run(
    run_dir: Path,
    files: list[str],
    source: str | None,
    all_targets: bool = False,
) -> Generator[TokenReader]:
    """Other files' text as rows like the run's own; see `evaluate_files` and `prepared`.

    Args:
        all_targets: every token is a target, whatever the run's rule is.
    """
    reading = reading_of(run_dir)
    if all_targets:
        reading = replace(reading, data=with_all_targets(reading.data))
    section = section_of(reading, source)
    table = RunFolder(run_dir).require_lineage().dataset.row_table
    with repairable():
        rows = read_row_table(dataset_of(run_dir) / ROW_TABLES / table).content
    with prepared(
        reading, section, files, rows, run_dir.absolute().parents[1]
    ) as reader:
        yield reader


def _perplexity(
    run_dir: Path,
    about: Evaluated,
    text: str | tuple[str, ...],
    model: Llama,
    read: Callable[[], Measured],
    request: EvaluationRequest | None,
    stream: bool = False,
) -> Perplexity:
    """Measure with and without the model's memory, and keep the result in the run's folder."""
    length = RunFolder(run_dir).require_lineage().dataset.sequence_length
    part = None if stream else part_of(model, length)
    losses = with_and_without_memory(model, lambda _: read().results(part))
    result = Perplexity.model_validate(
        dict(about) | {"text": text, "stream": stream} | losses
    )
    _append(run_dir, "evaluate", result, request)
    return result


def verified_reader(run_dir: Path, split: str) -> TokenReader:
    """Rows of one split of the dataset that a run was trained on.

    Each of its files is verified before its first use.

    Raises:
        DataError: the dataset is damaged, or another one than the run was trained on.
    """
    dataset = dataset_of(run_dir)
    bound = RunFolder(run_dir).require_lineage().dataset
    table = dataset / ROW_TABLES / bound.row_table
    with repairable():
        digest = read_row_table(table).digest
    if digest != bound.row_table_digest:  # undamaged, so --repair would not change it
        raise DataError(
            f"{table} has digest {digest}, and the run was trained on {bound.row_table_digest}."
        )
    with repairable():
        return TokenReader(dataset, bound.row_table, split, verify_on_read=True)


def find_passkeys(
    run_dir: Path,
    checkpoint: str,
    lengths: Sequence[int] = (),
    depths: Sequence[float] = DEPTHS,
    samples: int = SAMPLES,
    seed: int = 0,
    request: EvaluationRequest | None = None,
) -> PasskeyRetrieval:
    """Passkey retrieval of a run's model.

    For Infini-attention it is measured with and without its memory, and with that of another text.

    Args:
        lengths: of the texts, in tokens; empty: 1, 2, 4 and 8 sequence lengths as trained, those
            that have room for the number and the question.
        request: as in `evaluate`.
    """

    def measure(model: Llama, encoder: TextEncoder) -> list[dict[str, PasskeyResult]]:
        chosen = lengths or _lengths_with_room(run_dir, encoder)
        return passkey(model, encoder, chosen, depths, samples, seed)

    return _retrieval(
        run_dir, checkpoint, measure, {"samples": samples, "seed": seed}, request
    )


def find_passkeys_across(
    run_dir: Path,
    checkpoint: str,
    segments: list[int],
    facts: HiddenFacts,
    filler: str,
) -> PasskeyRetrieval:
    """Passkey retrieval by the number of segment boundaries between what is hidden and the answer.

    It is measured as by `find_passkeys`.

    Args:
        filler: repeated or random as in data.passkey.filler, or text: the run's own held-out text,
            which a text has at most once.

    Raises:
        ConfigError: as `passkey_across`; or there is no held-out text.
    """

    def measure(model: Llama, encoder: TextEncoder) -> list[dict[str, PasskeyResult]]:
        count = (max(segments) + EXTRA_SEGMENTS) * model.config.segment_length
        tokens = filler_tokens(run_dir, encoder, filler, max(count, MOST_FILLER))
        return passkey_across(model, encoder, segments, facts, tokens, filler != "text")

    settings = asdict(facts) | {"filler": filler}
    return _retrieval(run_dir, checkpoint, measure, settings, None)


def find_passkeys_after(
    run_dir: Path,
    files: list[str],
    checkpoint: str,
    source: str | None,
    lengths: Sequence[int],
    facts: HiddenFacts,
) -> PasskeyRetrieval:
    """Retrieval of facts after so many tokens of other files, whose text is read once.

    It is measured as by `find_passkeys`; see `passkey_after`.

    Args:
        files, source: as in `evaluate_files`.
        lengths: as in `find_passkeys`.

    Raises:
        ConfigError: the run's memory does not add, or as `evaluate_files` and `passkey_after`.
        DataError: as `evaluate_files`.
    """

    def measure(model: Llama, encoder: TextEncoder) -> list[dict[str, PasskeyResult]]:
        refuse_other_updates(model.config)
        with prepared_for_run(run_dir, files, source, all_targets=True) as reader:
            tokens = np.empty(reader.stream.ends[-1], dtype=reader.stream.dtype)
            reader.stream.copy(0, tokens)
        text = tokens[tokens != reader.padding].tolist()
        chosen = lengths or _multiples_of_trained_length(run_dir)
        return passkey_after(model, encoder, chosen, facts, text)

    settings = asdict(facts) | {"filler": "files", "text": tuple(files)}
    return _retrieval(run_dir, checkpoint, measure, settings, None)


def _lengths_with_room(run_dir: Path, encoder: TextEncoder) -> list[int]:
    """Multiples of the trained length that have room for a number, else the least with room."""
    least = least_length(encoder)
    lengths = _multiples_of_trained_length(run_dir)
    return [length for length in lengths if length >= least] or [least]


def _multiples_of_trained_length(run_dir: Path) -> tuple[int, ...]:
    row = RunFolder(run_dir).require_lineage().dataset.sequence_length
    return (row, 2 * row, 4 * row, 8 * row)


def filler_tokens(
    run_dir: Path,
    encoder: TextEncoder,
    filler: str,
    count: int,
) -> list[int]:
    """Tokens of the text around what is hidden; see `find_passkeys_across`.

    Args:
        count: how many of held-out text are enough; it may have fewer.
    """
    if filler == "text":
        reader = verified_reader(run_dir, "validation")
        rows = rows_of_text(reader, dataset_of(run_dir))
        rows = without_overlap(reader, rows)[: -(-count // reader.sequence_length)]
        tokens = repairable()(reader.gather)(rows)[:, :-1]
        return tokens[tokens != end_of_text_of(run_dir)].tolist()  # nor padding
    if filler == "repeated":
        return in_text(encoder, FILLER)
    random = Random(0)
    text = "".join(random_words(random) for _ in range(MOST_FILLER // 20))
    return in_text(encoder, text)


def rows_of_text(reader: TokenReader, dataset: Path) -> np.ndarray:
    """Rows int64 whose text hides nothing, of sources other than `source: passkey`.

    Raises:
        ConfigError: there is none.
    """
    data = DataConfig.model_validate(read_dataset(dataset).meta.data)
    texts = sections(data).items()
    made = {name for name, section in texts if section.source == "passkey"}
    rows = np.arange(len(reader), dtype=np.int64)
    if reader.sources:  # rows stand in the order of their sources
        is_made = [source.name in made for source in reader.sources]
        counts = [source.rows for source in reader.sources]
        rows = rows[~np.repeat(is_made, counts)]
    elif made:
        rows = rows[:0]
    if not len(rows):
        raise ConfigError(
            "--filler text: all held-out text has passkeys of its own; use repeated or random."
        )
    return rows


def without_overlap(reader: TokenReader, rows: np.ndarray) -> np.ndarray:
    """Those of ascending rows that have no text of an earlier one (data.stride)."""
    if not isinstance(reader.rows, WindowRows):
        return rows
    chosen: list[int] = []
    end = 0
    for row, start in zip(
        rows.tolist(), reader.rows.starts[rows].tolist(), strict=True
    ):
        if start >= end:
            chosen.append(row)
            end = start + reader.sequence_length
    return np.array(chosen, dtype=np.int64)


def _retrieval(
    run_dir: Path,
    checkpoint: str,
    measure: Callable[[Llama, TextEncoder], list[dict[str, PasskeyResult]]],
    settings: dict[str, Any],
    request: EvaluationRequest | None,
) -> PasskeyRetrieval:
    model, about = _open(run_dir, checkpoint, request is not None)
    measured = measure(model, reading_of(run_dir).encoder)
    results = {name: tuple(cells[name] for cells in measured) for name in measured[0]}
    row = {
        "trained_length": RunFolder(run_dir).require_lineage().dataset.sequence_length
    }
    result = PasskeyRetrieval.model_validate(dict(about) | settings | row | results)
    _append(run_dir, "passkey", result, request)
    return result


def _open(run_dir: Path, checkpoint: str, is_stage: bool) -> tuple[Llama, Evaluated]:
    """A run's model on the device on which it is measured.

    Args:
        is_stage: of the run, which takes no other GPU than its training; else the first GPU is
            used, if there is one.
    """
    model, _, chosen = load_run(run_dir, checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = RunReader(run_dir).environment if is_stage else None
    if environment is not None and environment.plan.device == "cpu":
        device = torch.device("cpu")
    elif environment is not None and device.type == "cuda":
        device = torch.device("cuda", environment.plan.gpus[0])
    about = Evaluated(
        run=run_dir.name,
        checkpoint=chosen.name,
        step=checkpoints.step_of(chosen),
        device=device.type,
    )
    return model.to(device), about


def _append(
    run_dir: Path,
    kind: str,
    result: Evaluated,
    request: EvaluationRequest | None,
) -> None:
    """Add the result to the run's evaluations, for its report."""
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    asked = {} if request is None else {"asked": request}
    fields = {"kind": kind, "measured": measured} | result.to_json() | asked
    run = RunFolder(run_dir)
    try:
        append_line(
            run.evaluations, EVALUATION_LINE.validate_python(fields), run.read_id()
        )
    except (OSError, Damaged) as error:
        log.warning("the result was not written to %s (%s)", run.evaluations, error)


def evaluate_trained(run_dir: Path, config: EvaluationConfig) -> Evaluations:
    """The measurements that `config.after_training` names.

    An earlier result for the same checkpoint and settings is reused.

    Raises:
        ConfigError, DataError: as `evaluate` and `find_passkeys` do.
    """
    results: dict[str, Perplexity | PasskeyRetrieval] = {}
    for kind in config.measurements:
        request = _request(run_dir, config)
        before = _measured_before(run_dir, kind, request)
        if before is not None:
            log.info("%s of %s was already measured", kind, request.checkpoint)
            results[kind] = before
            continue
        log.info("measuring %s of %s", kind, request.checkpoint)
        if kind == "perplexity":
            results[kind] = evaluate(
                run_dir,
                request.checkpoint,
                sequences=config.sequences,
                request=request,
            )
        else:
            results[kind] = find_passkeys(
                run_dir,
                request.checkpoint,
                config.passkey_lengths,
                request=request,
            )
    return Evaluations.model_validate(
        {kind: result.to_json() for kind, result in results.items()}
    )


def _request(run_dir: Path, config: EvaluationConfig) -> EvaluationRequest:
    chosen = find_checkpoint(run_dir, "latest")
    return EvaluationRequest(
        checkpoint=chosen.name,
        digest=read_manifest(chosen, checkpoints.KIND).digest,
        sequences=config.sequences,
        passkey_lengths=tuple(config.passkey_lengths),
    )


def _measured_before(
    run_dir: Path, kind: str, request: EvaluationRequest
) -> EvaluationLine | None:
    """The line of an earlier command with the same request; None if there is none."""
    run = RunFolder(run_dir)
    lines = reversed(read_lines(run.evaluations, EVALUATION_LINE, run.read_id()))
    of_kind = (
        line
        for line in lines
        if isinstance(line, PerplexityLine) == (kind == "perplexity")
    )
    return next((line for line in of_kind if line.asked == request), None)
