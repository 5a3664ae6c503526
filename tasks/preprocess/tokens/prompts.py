"""`data.loss_on: answer`: the prompt and the answer of a document are encoded apart, so that the mask of the loss is exact.

Generation encodes a prompt alone as well, so the model is asked with the tokens it was trained on.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_llama.configs.errors import DataError

COLUMN = "prompt_tokens"
Encode = Callable[[list[bytes]], tuple[np.ndarray, np.ndarray]]


def split_text(text: bytes, answer_after: bytes) -> tuple[bytes, bytes]:
    """A text's prompt, which ends with the last occurrence of `answer_after`, and its answer.

    Raises:
        ValueError: the text does not contain `answer_after`.
    """
    start = text.rindex(answer_after) + len(answer_after)
    return text[:start], text[start:]


def encode_answers(
    encode: Encode, texts: list[bytes], answer_after: bytes
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Ids of several documents, joined, where in them each begins [documents + 1], and the tokens of each one's prompt.

    Args:
        answer_after: ends the prompt. Empty: documents have no prompt, and the third part is None.

    Raises:
        ValueError: a text does not contain `answer_after`.
    """
    if not answer_after:
        return *encode(texts), None
    ids, offsets = encode([part for text in texts for part in split_text(text, answer_after)])
    return ids, offsets[::2], offsets[1::2] - offsets[:-1:2]


def map_prompts(shard: Path) -> np.ndarray:
    """Tokens of the prompt of each document of a shard, int64 [documents], as a view of the file.

    Raises:
        DataError: the shard does not have them.
    """
    try:
        batch = pa.ipc.open_stream(pa.memory_map(str(shard))).read_next_batch()
        return np.frombuffer(batch.column(COLUMN).buffers()[1], np.int64, batch.num_rows)
    except (pa.ArrowInvalid, StopIteration, OSError, KeyError) as error:
        raise DataError(f"{shard} has no readable column {COLUMN} ({error}).") from None


def mark_answers(target: np.ndarray, place: int, offsets: np.ndarray, prompts: np.ndarray) -> None:
    """Sets `target`, bool [tokens of a row], to True at the tokens of answers and at the ends of their documents.

    Args:
        place: of the row's first token in the shard; below 0 where the row begins in an earlier shard.
        offsets: of the shard's documents [documents + 1].
        prompts: tokens of each one's prompt [documents].
    """
    first = max(0, int(np.searchsorted(offsets, place, side="right")) - 1)
    last = int(np.searchsorted(offsets[:-1], place + len(target)))
    begins, ends = offsets[first:last] + prompts[first:last] - place, offsets[first + 1 : last + 1] - place
    for begin, end in zip(begins.clip(0).tolist(), ends.tolist(), strict=True):
        target[begin:end] = True
