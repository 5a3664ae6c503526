"""Worker processes of this machine, which end with the process that started them."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import TypeVar

from infini_llama.configs.errors import PipelineError

T = TypeVar("T")
POLL = 0.2  # seconds


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


def result_of(future: Future[T]) -> T:
    """What the worker returned.

    Raises:
        PipelineError: it was killed.
    """
    try:
        return future.result()
    except BrokenProcessPool:
        raise PipelineError(
            "a worker process of preprocess was killed, perhaps for lack of memory. Finished shards are kept: run the "
            "same command again, with a smaller data.num_workers or data.shard_size if this recurs."
        ) from None


def _begin(threads: int, ends: Connection) -> None:
    """In a worker process: its share of the cores, and an end with its parent, or when its parent closes the pipe."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: wait_for([parent.sentinel, ends]) and os._exit(1), daemon=True).start()
