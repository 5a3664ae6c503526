"""Doing the units of a plan, in this process or in several: the bytes are the same."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources.sources import Source
from infini_llama.tasks.preprocess.sources.texts import batches
from infini_llama.tasks.preprocess.tokenizers.encoder import first_special, special_ids
from infini_llama.tasks.preprocess.tokenizers.engines import open_engine
from infini_llama.tasks.preprocess.tokens.answers import encode_answers
from infini_llama.tasks.preprocess.tokens.clusters import do_on_cluster
from infini_llama.tasks.preprocess.tokens.journal import Journal
from infini_llama.tasks.preprocess.tokens.plan import Plan, Unit, shares_of
from infini_llama.tasks.preprocess.tokens.reuse import reuse, with_keys
from infini_llama.tasks.preprocess.tokens.shards import Stream, dtype_for, write_shard
from infini_llama.tasks.preprocess.tokens.spool import Spool, SpoolReader
from infini_llama.tasks.preprocess.workers.local import POLL, result_of, worker_processes
from infini_llama.tasks.progress import megabytes
from infini_llama.tasks.records.manifest import EngineChoice

log = logging.getLogger("infini_llama.preprocess")
LABELS = {"train": "tokenizing training text", "validation": "tokenizing validation text"}
Finish = Callable[[str, str, int, int], None]  # name of the shard's file, key, documents, tokens


@dataclass(frozen=True)
class Encoding:
    """What turns text into tokens.

    Attributes:
        eos: the token that ends a document.
        engine: what encodes.
        answer_after: ends the prompt of a document, which is encoded apart (data.answer_after); empty where there is none.
    """

    tokenizer: Tokenizer
    eos: int
    engine: EngineChoice
    answer_after: str = ""


def write_shards(data: DataConfig, plan: Plan, encoding: Encoding, journal: Journal, surveyed: Spool) -> None:
    """Every shard of the plan: what is done, what earlier datasets or the survey have, and the rest, which is tokenized.

    Args:
        journal: of the build; its working folder is beside the earlier datasets.
        surveyed: where the tokens are that the survey found.

    Raises:
        PipelineError: a worker process was killed; what is done is kept.
        EngineDiffers: a fast engine was caught with other ids than the reference's.
    """
    engine = encoding.engine
    plan = with_keys(plan, journal.work / "tokenizer.json", encoding.eos, engine, encoding.answer_after)
    done = journal.entries()
    missing = [unit for unit in plan.units if unit.file not in done or done[unit.file].key != unit.key]
    journal.discard(unit.file for unit in missing)  # written by another engine or version than today's
    if len(missing) < len(plan.units):
        log.info("resuming: %d of %d shards are finished", len(plan.units) - len(missing), len(plan.units))
    missing = reuse(missing, journal.work.parent, journal)
    if surveyed.encodes_by(engine) and not encoding.answer_after:
        missing = _write_surveyed(plan, missing, SpoolReader(surveyed), journal)
    if missing:
        do_units(plan, missing, journal, encoding, data)


def do_units(plan: Plan, units: list[Unit], journal: Journal, encoding: Encoding, data: DataConfig) -> None:
    """Writes the shard of every unit in `units` and notes it in the journal, by `data.num_workers` processes or by a cluster.

    Raises:
        PipelineError: a worker process was killed; what is done is kept.
        EngineDiffers: a fast engine was caught with other ids than the reference's.
    """
    if data.engine != "local":
        do = partial(_do_remotely, (encoding.eos, encoding.engine, encoding.answer_after))
        do_on_cluster(do, plan, units, journal, data, lambda: _log_shares(units, journal))
        return
    shares = shares_of(units, -(-len(units) // data.num_workers))
    processes = len(shares)
    if processes < 2:
        _do(plan, units, encoding, journal.work, journal.record, verbose=True)
        return
    with worker_processes(processes) as pool:
        pending = {pool.submit(_do, plan, share, encoding, journal.work, journal.record) for share in shares}
        while pending:
            done, pending = wait(pending, timeout=POLL)
            _log_shares(units, journal)
            for future in done:
                result_of(future)


def _do_remotely(
    encoder: tuple[int, EngineChoice, str], plan: Plan, units: list[Unit], work: Path, into: Path, finish: Finish
) -> None:
    """As `_do`; `encoder`: the fields of `Encoding` but the tokenizer, which is no plain value."""
    encoding = Encoding(Tokenizer.from_file(str(work / "tokenizer.json")), *encoder)
    _do(plan, units, encoding, into, finish)


def _do(plan: Plan, units: list[Unit], encoding: Encoding, into: Path, finish: Finish, verbose: bool = False) -> None:
    """Writes the shards of `units` below `into`; `finish` gets each one's name, key and counts.

    A shard is written, synced and hashed by another thread while the next one is encoded.
    """
    encode, dtype = (
        open_engine(encoding.engine.name, encoding.tokenizer),
        dtype_for(encoding.tokenizer.get_vocab_size()),
    )
    special = special_ids(encoding.tokenizer)
    totals = {split: sum(unit.size for unit in units if unit.split == split) for split in LABELS}
    done = dict.fromkeys(LABELS, 0)
    texts: Iterator[tuple[str, int]] = iter(())
    following: tuple[str, int] | None = None
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for unit in units:
            if following != (unit.split, unit.first):  # else the files are read on from where they are
                texts = plan.texts(unit.split, unit.first)
            stream = Stream(dtype, unit.size + unit.documents)
            first = unit.first
            for batch, size in batches(islice(texts, unit.documents)):
                try:
                    ids, offsets, prompts = encode_answers(encode, batch, encoding.answer_after)
                except ValueError:
                    number = next(place for place, text in enumerate(batch) if encoding.answer_after not in text)
                    source = plan.source(unit.split, first + number)
                    raise _without_answer(source, encoding.answer_after, batch[number]) from None
                if (place := first_special(special, ids)) is not None:
                    source = plan.source(unit.split, first + int(np.searchsorted(offsets, place, side="right")) - 1)
                    raise _special(source, encoding.tokenizer.id_to_token(int(ids[place])))
                stream.add(ids, offsets, encoding.eos, prompts)
                first += len(batch)
                done[unit.split] += size
                if verbose:
                    progress = megabytes(done[unit.split], totals[unit.split])
                    log.info(LABELS[unit.split], extra={"progress": progress})
            if written:
                written.result()
            lengths = np.concatenate(stream.lengths)
            prompts = np.concatenate(stream.prompts) if stream.prompts else None
            written = writer.submit(_write, into, unit, stream.values[: stream.filled], lengths, finish, prompts)
            following = (unit.split, unit.first + unit.documents)
        if written:
            written.result()


def _write_surveyed(plan: Plan, units: list[Unit], known: SpoolReader, journal: Journal) -> list[Unit]:
    """Writes the shards of the units all of whose tokens the survey found, and returns the other units."""
    left, written = [], None
    with ThreadPoolExecutor(1) as writer:
        for unit, parts in plan.rows(units):
            if not all(known.has(table) for table, _ in parts):
                left.append(unit)
                continue
            values, lengths = known.gather(parts)
            if written:
                written.result()
            written = writer.submit(_write, journal.work, unit, values, lengths, journal.record)
        if written:
            written.result()
    return left


def _write(
    into: Path,
    unit: Unit,
    values: np.ndarray,
    lengths: np.ndarray,
    finish: Finish,
    prompts: np.ndarray | None = None,
) -> None:
    path = into / unit.file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, values, lengths, prompts)
    finish(unit.file, unit.key, unit.documents, len(values))


def _without_answer(source: Source, answer_after: str, text: str) -> DataError:
    return DataError(
        f"{source} has a document without data.answer_after={answer_after!r} ({text[:60]!r} …), so it has no answer; "
        "leave it out, correct the key, or set data.loss_on=all."
    )


def _special(source: Source, token: str | None) -> DataError:
    return DataError(
        f"{source} has a text that contains '{token}', which becomes that special token with this tokenizer; name a "
        "tokenizer in which it is an added token alone, remove it from the text, or leave the file out of "
        f"{source.key}."
    )


def _log_shares(units: list[Unit], journal: Journal) -> None:
    finished = journal.entries()
    done = sum(unit.size for unit in units if unit.file in finished)
    total = sum(unit.size for unit in units)
    log.info("tokenizing", extra={"progress": megabytes(done, total)})
