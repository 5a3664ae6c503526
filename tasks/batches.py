"""Items in batches of about a size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

BATCH_BYTES = 2_000_000  # of text that is tokenized at once
T = TypeVar("T")


def batches(
    items: Iterable[T],
    size: Callable[[T], int],
    most: int = BATCH_BYTES,
) -> Iterator[list[T]]:
    """Texts, or what stands for them, of about `most` bytes in all at a time; none is cut.

    Args:
        size: bytes of one.
    """
    batch: list[T] = []
    together = 0
    for item in items:
        batch.append(item)
        together += size(item)
        if together >= most:
            yield batch
            batch = []
            together = 0
    if batch:
        yield batch
