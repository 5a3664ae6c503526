"""Limits for what a tokenizer of others may cost: its patterns decide how long a text takes, and how much it grows."""

import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from infini_llama.configs.errors import DataError

T = TypeVar("T")
# Every tokenizer trained here takes about 1 microsecond and 150 bytes of memory per byte of text.
CPU_SECONDS, CPU_SECONDS_PER_BYTE = 60.0, 50e-6
MEMORY, MEMORY_PER_BYTE = 2**30, 500
POLL = 0.1  # seconds
GRACE = 5.0  # seconds in which work that was interrupted may still end by itself


def within_limits(work: Callable[[], T], size: int, what: str = "the tokenizer") -> T:
    """work() on `size` bytes of text, in a thread of its own: signals are handled in the main thread alone, which waits in Python.

    The time is that of the processor, so that a busy or suspended machine changes nothing. A thread that is beyond its limits cannot
    be ended: it ends with the process, which the error ends.

    Args:
        what: subject of the error's sentence.

    Raises:
        DataError: it takes too long, too much memory, or breaks off inside the library.
    """
    seconds, memory = CPU_SECONDS + CPU_SECONDS_PER_BYTE * size, MEMORY + MEMORY_PER_BYTE * size
    begun, resident = time.process_time(), _most_resident()
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        while not wait([result], timeout=POLL).done:
            if time.process_time() - begun > seconds:
                raise DataError(
                    f"{what} takes more than {seconds:.0f} s of processor time for {size:,} bytes of text; use "
                    "another tokenizer, whose patterns backtrack less."
                )
            if _most_resident() - resident > memory:
                raise DataError(
                    f"{what} takes more than {memory / 2**30:.1f} GiB of memory for {size:,} bytes of text; use "
                    "another tokenizer, whose normalizer does not expand text as much."
                )
    except DataError:
        raise
    except BaseException:  # a request to stop; work that ends while the interpreter does would abort it
        wait([result], timeout=GRACE)
        raise
    try:
        return result.result()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the library, which is no Exception
            raise
        raise DataError(f"{what} fails ({' '.join(str(error).split())[:200]}); use another tokenizer.") from None


def _most_resident() -> int:
    """The most memory that this process has had at a time, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
