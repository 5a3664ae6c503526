"""Doing the units of a plan, in this process or in several: the bytes are the same."""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.tasks.preprocess.tokenizers.engines import open_engine
from infini_llama.tasks.preprocess.tokenizers.tokenizer import special_ids
from infini_llama.tasks.preprocess.tokens.clusters import do_on_cluster
from infini_llama.tasks.preprocess.tokens.journal import Journal
from infini_llama.tasks.preprocess.tokens.plan import Plan, Unit
from infini_llama.tasks.preprocess.tokens.shards import Stream, batches, dtype_for, write_shard

log = logging.getLogger("infini_llama.preprocess")
LABELS = {"train": "tokenizing training text", "validation": "tokenizing validation text"}
POLL = 0.2  # seconds
Finish = Callable[..., None]


def do_units(
    plan: Plan, units: list[Unit], journal: Journal, tokenizer: Tokenizer, eos: int, data: dict, engine: str
) -> None:
    """Writes the shard of every unit in `units` and notes it in the journal, by `data["num_workers"]` processes or by a cluster.

    Raises:
        PipelineError: a worker process was killed; what is done is kept.
        EngineDiffers: a fast engine was caught with other ids than the reference's.
    """
    if data["engine"] != "local":
        do_on_cluster(
            partial(_do_remotely, eos, engine), plan, units, journal, data, lambda: _tell_shares(units, journal)
        )
        return
    processes = min(data["num_workers"], len(units))
    if processes < 2:
        _do(plan, units, tokenizer, journal.work, eos, engine, journal.record, tell=True)
        return
    shares = [units[len(units) * k // processes : len(units) * (k + 1) // processes] for k in range(processes)]
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    spawn = multiprocessing.get_context("spawn")
    ends, held = spawn.Pipe(duplex=False)
    with (
        ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=(threads, ends)) as pool,
        _closed_by_fault(held),
    ):
        pending = {
            pool.submit(_do, plan, share, tokenizer, journal.work, eos, engine, journal.record) for share in shares
        }
        while pending:
            done, pending = wait(pending, timeout=POLL)
            _tell_shares(units, journal)
            for future in done:
                try:
                    future.result()
                except BrokenProcessPool:
                    raise PipelineError(
                        "a worker process of preprocess was killed, perhaps for memory; what is done is kept: run the same command "
                        "again, with a smaller data.num_workers or data.shard_size if it happens again."
                    ) from None


@contextmanager
def _closed_by_fault(held: Connection) -> Iterator[None]:
    """Ends the worker processes where this one breaks off; the pool would wait for all that they have begun."""
    try:
        yield
    except BaseException:
        held.close()
        raise


def _begin(threads: int, ends: Connection) -> None:
    """In a worker process: its share of the cores, and no life after its parent's, or after its parent's interest in it."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: wait_for([parent.sentinel, ends]) and os._exit(1), daemon=True).start()


def _do_remotely(eos: int, engine: str, plan: Plan, units: list[Unit], work: Path, into: Path, finish: Finish) -> None:
    _do(plan, units, Tokenizer.from_file(str(work / "tokenizer.json")), into, eos, engine, finish)


def _do(
    plan: Plan,
    units: list[Unit],
    tokenizer: Tokenizer,
    into: Path,
    eos: int,
    engine: str,
    finish: Finish,
    tell: bool = False,
) -> None:
    """Writes the shards of `units` below `into`; `finish` is told each one's name, key and counts."""
    encode, dtype = open_engine(engine, tokenizer), dtype_for(tokenizer.get_vocab_size())
    special = special_ids(tokenizer)
    texts: Iterator[tuple[str, int]] = iter(())
    following: tuple[str, int] | None = None
    for unit in units:
        if following != (unit.split, unit.first):  # else the files are read on from where they are
            texts = plan.texts(unit.split, unit.first)
        stream = Stream(dtype, unit.size + unit.documents)
        done = sum(other.size for other in plan.units if other.split == unit.split and other.number < unit.number)
        first = unit.first
        for batch, size in batches(islice(texts, unit.documents)):
            ids, offsets = encode(batch)
            if (found := special.take(ids)).any():
                place = int(found.argmax())
                source = plan.source(unit.split, first + int(np.searchsorted(offsets, place, side="right")) - 1)
                raise DataError(
                    f"{source} has a text that contains '{tokenizer.id_to_token(int(ids[place]))}', which becomes that special "
                    f"token with this tokenizer; name a tokenizer in which it is an added token alone, remove it from the text, or "
                    f"leave the file out of {source.key}."
                )
            stream.add(ids, offsets, eos)
            first += len(batch)
            done += size
            if tell:
                total = sum(other.size for other in plan.units if other.split == unit.split)
                progress = {"done": round(done / 1e6, 1), "total": round(total / 1e6, 1), "unit": "MB"}
                log.info(LABELS[unit.split], extra={"progress": progress})
        path = into / unit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shard(path, stream.values[: stream.filled], np.concatenate(stream.lengths))
        finish(unit.file, key=unit.key, documents=unit.documents, tokens=stream.filled)
        following = (unit.split, unit.first + unit.documents)


def _tell_shares(units: list[Unit], journal: Journal) -> None:
    finished = journal.lines()
    done = sum(unit.size for unit in units if unit.file in finished)
    total = sum(unit.size for unit in units)
    progress = {"done": round(done / 1e6, 1), "total": round(total / 1e6, 1), "unit": "MB"}
    log.info("tokenizing", extra={"progress": progress})
