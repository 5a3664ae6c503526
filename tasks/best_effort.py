"""Blocks that are for people alone: an error in one ends no run."""

import contextlib
import logging
from collections.abc import Iterator

from infini_llama.configs.errors import is_panic

log = logging.getLogger("infini_llama.optional")
_failed = set[str]()  # what failed in this process, of what is tried again and again


@contextlib.contextmanager
def best_effort(
    what: str,
    advice: str = "",
    repeated: bool = False,
    raised: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """A block that is only for people, which ends no run.

    An error in the block is logged as a warning, and the run continues.

    Args:
        what: the part of the run that is missing then.
        advice: a sentence that says what to do about it.
        repeated: the block runs repeatedly: only the first error is logged, with the traceback.
        raised: errors that end the run all the same.
    """
    try:
        yield
    except BaseException as fault:
        is_of_block = isinstance(fault, Exception) or is_panic(fault)
        if not is_of_block or isinstance(fault, raised):
            raise
        level = logging.DEBUG if repeated and what in _failed else logging.WARNING
        _failed.add(what)
        failed = f"{what} failed ({type(fault).__name__}: {fault})"
        words = f"{failed}; the run continues without. {advice}"
        log.log(level, "%s", words.rstrip(), exc_info=repeated)
