"""One function over all parts of the text: in this process, in several of this machine, or by the workers of a cluster."""

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for

from infini_llama.configs.errors import PipelineError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokens.parts import Filters, Part, PartReader, PartReport
from infini_llama.tasks.preprocess.tokens.units import TOKENIZER, Recipe, write_unit
from infini_llama.tasks.preprocess.workers.clusters import open_cluster

POLL = 0.2  # seconds


@dataclass(frozen=True)
class Job:
    """What is done with every part."""

    recipe: Recipe
    filters: Filters


def prepare_part(job: Job, part: Part) -> PartReport:
    """Reads a part and writes those of its units that are missing or damaged."""
    reader = PartReader(part, job.filters)
    for documents in reader.units():
        write_unit(job.recipe, documents)
    return reader.report()


def prepare_parts(job: Job, parts: Sequence[Part], data: DataConfig) -> Iterator[tuple[Part, PartReport]]:
    """Each part and what was read of it, in any order. A part is done again where its worker was lost.

    Raises:
        DataError: bad input; see `PartReader` and `write_unit`.
        PipelineError: a worker was killed; finished units are kept.
        EngineDiffers: a fast engine was caught with other ids than the reference's.
    """
    if data.engine != "local" and parts:
        with open_cluster(data) as cluster:
            yield from cluster.run(prepare_part, job, parts, job.recipe.folder / TOKENIZER)
        return
    processes = min(data.num_workers, len(parts))
    if processes < 2:
        yield from ((part, prepare_part(job, part)) for part in parts)
        return
    with worker_processes(processes) as pool:
        pending = {pool.submit(prepare_part, job, part): part for part in parts}
        while pending:
            done, _ = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
            for future in done:
                part = pending.pop(future)
                try:
                    yield part, future.result()
                except BrokenProcessPool:
                    raise PipelineError(
                        "a worker process of preprocess was killed, perhaps for lack of memory. Finished units are kept: run the "
                        "same command again, with a smaller data.num_workers if this recurs."
                    ) from None


@contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """`count` processes with an equal share of the cores. Where the block raises, they end at once, and not after what they have begun."""
    threads = max(1, len(os.sched_getaffinity(0)) // count) if hasattr(os, "sched_getaffinity") else 1
    spawn = multiprocessing.get_context("spawn")
    reading_end, writing_end = spawn.Pipe(duplex=False)
    with ProcessPoolExecutor(count, spawn, initializer=_begin, initargs=(threads, reading_end)) as pool:
        try:
            yield pool
        except BaseException:
            writing_end.close()
            raise


def _begin(threads: int, ends: Connection) -> None:
    """In a worker process: its share of the cores, and an end with its parent, or when its parent closes the pipe."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: wait_for([parent.sentinel, ends]) and os._exit(1), daemon=True).start()
