"""Every token and offset of a dataset, several shards at a time, and what they add up to."""

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from infini_llama.tasks.preprocess.tokens.answers import map_prompts
from infini_llama.tasks.preprocess.tokens.reader import map_list
from infini_llama.tasks.preprocess.tokens.shards import entropy_bits
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.dataset import SplitStatistics
from infini_llama.tasks.records.manifest import DatasetContent, Shard
from infini_llama.tasks.storage.artifacts import Damaged

AT_ONCE = 2_000_000  # tokens counted together; bincount widens them
MOST_THREADS = 16  # a disk gives no more to more
log = logging.getLogger("infini_llama.verify")


@dataclass(frozen=True, eq=False)
class ShardCounts:
    """What was counted in one shard."""

    lengths: np.ndarray  # int64 [documents]: tokens of each
    counts: np.ndarray  # int64 [vocab_size]: how often each token occurs


def check_split(dataset: Path, split: str, content: DatasetContent) -> SplitStatistics:
    """Compares the shards of a split with the manifest's `content`, in threads: numpy lets go of the interpreter.

    Raises:
        Damaged: names the first shard that differs.
    """
    facts, counts, lengths = content[split], np.zeros(content.vocab_size, dtype=np.int64), []
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        checked = pool.map(partial(_check, dataset, content), _placed(facts.shards))
        for number, found in enumerate(checked, start=1):
            counts += found.counts
            lengths.append(found.lengths)
            progress = Reached(number, len(facts.shards), "shards")
            log.info("checking the tokens of %s", split, extra={"progress": progress})
    every = np.concatenate(lengths)
    if (len(every), int(every.sum())) != (facts.documents, facts.tokens):
        raise Damaged(f"the shards of {dataset / split} do not add up to what the manifest says.")
    return SplitStatistics(
        documents=len(every),
        tokens=int(every.sum()),
        bytes=facts.bytes,
        bytes_per_token=facts.bytes / int(every.sum()),
        shortest_document=int(every.min()),
        median_document=float(np.median(every)),
        mean_document=float(every.mean()),
        longest_document=int(every.max()),
        vocabulary_used=float((counts > 0).mean()),
        most_frequent_token=float(counts.max() / counts.sum()),
        entropy_bits=entropy_bits(counts),
    )


def _placed(shards: Iterable[Shard]) -> Iterator[tuple[Shard, int, int]]:
    """Each shard with the number of documents and tokens that the manifest says are before it."""
    documents = tokens = 0
    for shard in shards:
        yield shard, documents, tokens
        documents, tokens = documents + shard.documents, tokens + shard.tokens


def _check(dataset: Path, content: DatasetContent, placed: tuple[Shard, int, int]) -> ShardCounts:
    shard, documents, tokens = placed
    path = dataset / shard.file
    offsets, values = map_list(path)
    names = ("documents", "tokens", "first_document", "first_token")
    stated = (shard.documents, shard.tokens, shard.first_document, shard.first_token)
    found = (len(offsets) - 1, len(values), documents, tokens)
    if found != stated:
        here, there = (dict(zip(names, numbers, strict=True)) for numbers in (found, stated))
        raise Damaged(f"{path} has {here}; the manifest says {there}.")
    if values.dtype != content.dtype:
        raise Damaged(f"{path} holds {values.dtype}; the manifest says {content.dtype}.")
    if values.max() >= content.vocab_size:
        raise Damaged(f"{path} has token {values.max()}, beyond the vocabulary of {content.vocab_size}.")
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(values) or (lengths <= 0).any():
        raise Damaged(f"{path} has document offsets that do not ascend from 0 to its end.")
    if not np.array_equal(np.flatnonzero(values == content.eos_id), offsets[1:] - 1):
        raise Damaged(f"{path} has documents that do not end with the one end-of-text token they should have.")
    if content.loss_on == "answer" and not _fit(map_prompts(path), lengths):
        raise Damaged(f"{path} has prompts that are longer than their documents.")
    counts = np.zeros(content.vocab_size, dtype=np.int64)
    for start in range(0, len(values), AT_ONCE):
        counts += np.bincount(values[start : start + AT_ONCE], minlength=len(counts))
    return ShardCounts(lengths, counts)


def _fit(prompts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether there is a prompt for each document, and room behind it for the document's end."""
    return len(prompts) == len(lengths) and bool((prompts >= 0).all() and (prompts < lengths).all())
