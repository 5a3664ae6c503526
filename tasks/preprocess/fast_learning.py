"""Byte-level BPE learned by gigatoken, to the tokenizer.json that `tokenizers` learns.

The two learn the same merges as long as a pair of tokens occurs twice, which is where `tokenizers`
ends and gigatoken goes on. gigatoken takes a tenth of the CPU time, in a process of its own over a
temporary file, whose memory is mapped from that file. Wherever the two could differ, `tokenizers`
learns.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.tasks.batches import batches
from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.preprocess import merges
from infini_llama.tasks.tokenizers.differing_characters import CUT, has_any
from infini_llama.tasks.tokenizers.encoder import encoder_of
from infini_llama.tasks.tokenizers.engines import (
    FAST,
    REFERENCE,
    WORTH_A_FAST_ENGINE,
    gigatoken_of,
)
from infini_llama.tasks.tokenizers.tiktoken_encodings import byte_letters
from infini_llama.tasks.tokenizers.tokenizer import (
    EOS,
    MIN_FREQUENCY,
    byte_pair_tokenizer,
    train,
)

FREE_SPACE = 2**30  # bytes that stay free on the disk
READ_AT_ONCE = 2**20
log = logging.getLogger("infini_llama.preprocess")


class LearnsOtherwise(Exception):
    """gigatoken cannot learn the tokenizer that `tokenizers` learns; the message says why."""


def learn(
    texts: Iterable[bytes],
    settings: TokenizerConfig,
    folder: Path,
    size: int,
) -> Tokenizer:
    """`train`, by gigatoken where it is faster and gives the same tokenizer.json.

    Args:
        texts: in UTF-8.
        folder: for a temporary file with all of the text.
        size: bytes of the files as they are stored; 0: unknown.
    """
    waiting = iter(texts)
    if find_spec(FAST) is None or 0 < size < WORTH_A_FAST_ENGINE:
        return train(map(bytes.decode, waiting), settings)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(
        dir=folder
    ) as file:  # without a name: nothing is left of it
        try:
            if settings.kind != "bpe":
                raise LearnsOtherwise(f"data.tokenizer.kind={settings.kind}")
            _require_space(folder, size)
            _write(waiting, file, folder)
            if file.tell() < WORTH_A_FAST_ENGINE:
                return train(map(bytes.decode, _documents(file)), settings)
            return _learned(file, settings)
        except LearnsOtherwise as reason:
            log.info(
                "%s learns the tokenizer, which takes longer: %s", REFERENCE, reason
            )
            return train(map(bytes.decode, chain(_documents(file), waiting)), settings)


def _require_space(folder: Path, size: int) -> None:
    """Require space on the disk for so many bytes, beside FREE_SPACE."""
    free = shutil.disk_usage(folder).free
    if free < size + FREE_SPACE:
        raise LearnsOtherwise(
            f"{folder} has {in_bytes(free)} free, and a copy of the text needs {in_bytes(size)}, "
            f"beside {in_bytes(FREE_SPACE)} that stay free"
        )


def _write(texts: Iterator[bytes], file: BinaryIO, folder: Path) -> None:
    """Write the documents, with a separator behind each.

    Raises:
        LearnsOtherwise: gigatoken cuts words of the text otherwise, or the disk is nearly full.
            What was taken of `texts` is in the file.
    """
    for batch in batches(texts, len):
        joined = b"".join(text + merges.SEPARATOR for text in batch)
        file.write(joined)
        if has_any(joined.replace(merges.SEPARATOR, b""), CUT):
            raise LearnsOtherwise(
                f"the text has a character that {FAST} takes for one of another class"
            )
        _require_space(folder, 0)
    file.flush()


def _documents(file: BinaryIO) -> Iterator[bytes]:
    """The documents that were written, but for empty ones."""
    file.seek(0)
    rest = b""
    while part := file.read(READ_AT_ONCE):
        *documents, rest = (rest + part).split(merges.SEPARATOR)
        yield from filter(None, documents)


def _learned(file: BinaryIO, settings: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the documents in a file.

    Raises:
        LearnsOtherwise: that of `tokenizers` may be another one.
    """
    special = [EOS, *settings.special_tokens]
    letters = byte_letters()
    number = settings.vocab_size - len(special) - merges.BYTES
    pairs = [
        (
            "".join(letters[byte] for byte in left),
            "".join(letters[byte] for byte in right),
        )
        for left, right in _merges(file, number)
    ]
    tokens = [*special, *sorted(letters), *(left + right for left, right in pairs)]
    repeated = len(tokens) - len(set(tokens))
    if repeated:
        raise LearnsOtherwise(
            f"{repeated} token(s) that {FAST} learned are special ones, or were learned twice"
        )
    tokenizer = byte_pair_tokenizer(tokens, pairs, special)
    if pairs:
        _require_frequent(tokenizer, len(tokens) - 1, file)
    return tokenizer


def _merges(file: BinaryIO, number: int) -> list[tuple[bytes, bytes]]:
    """At most so many merges, learned by gigatoken in another process, which ends with this one.

    Raises:
        LearnsOtherwise: it failed.
    """
    descriptor = file.fileno()
    arguments = [str(os.getpid()), f"/dev/fd/{descriptor}", str(number)]
    learning = subprocess.run(  # it is killed if this process is to stop
        [sys.executable, "-P", "-m", merges.__name__, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        pass_fds=[descriptor],
    )
    if learning.returncode:
        last = next(reversed(learning.stderr.splitlines()), "it printed nothing")
        raise LearnsOtherwise(
            f"{FAST} ended with status {learning.returncode} ({last})"
        )
    lines = (line.split() for line in learning.stdout.splitlines())
    return [(bytes.fromhex(left), bytes.fromhex(right)) for left, right in lines]


def _require_frequent(tokenizer: Tokenizer, last: int, file: BinaryIO) -> None:
    """Require that the text has the token that was learned last MIN_FREQUENCY times.

    No pair that is merged later occurs more often than one that was merged before, so all tokens
    occur as often.
    """
    encode = gigatoken_of(encoder_of(tokenizer, split_special_tokens=True).to_str())
    found = 0
    for batch in batches(_documents(file), len):
        ids, _ = encode(batch)
        found += int(np.count_nonzero(ids == last))
        if found >= MIN_FREQUENCY:
            return
    raise LearnsOtherwise(
        f"there is too little text for data.tokenizer.vocab_size: the last token occurs {found} "
        "time(s) in it"
    )
