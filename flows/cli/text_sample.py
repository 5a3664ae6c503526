"""The text of a new configuration: its files, and how many tokens a sample of them lets expect."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.variables import as_written, without_variables
from infini_llama.flows.cli.model_size import SHORTEST
from infini_llama.tasks.preprocess.sources.files import File, Files, matching
from infini_llama.tasks.preprocess.sources.formats import format_read
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.remote import RemoteFile
from infini_llama.tasks.preprocess.sources.source import TextInput
from infini_llama.tasks.preprocess.sources.texts import Fault, TextRecords, Unreadable
from infini_llama.tasks.tokenizers.encoder import TextEncoder

BYTES_PER_TOKEN = 3.5  # roughly, for English text and a learned vocabulary
ENCODED_BYTES = 2**18  # of each sampled file, where the tokenizer is known
# How many files are read to estimate how much text a byte of a file holds, and of each about so
# many bytes of the file where it can be read in part, else of the text.
SAMPLED_FILES = 8
SAMPLED_BYTES = 4 * 2**20
# A file that cannot be read in part, as a compressed one, is read whole up to so many bytes.
READ_WHOLE = 16 * 2**20
# Less text than this many sequences of this many tokens is refused.
FEWEST_SEQUENCES = 16
# Of so many tokens, 5 % are enough to hold out; of less, 20 %.
MUCH = 10_000_000


@dataclass(frozen=True)
class Text:
    """The user's text.

    Attributes:
        patterns: as given with --files, also with variables, which the configuration keeps.
        tokens: estimated from a sample.
        column: the key data.text_column, if it was given.
    """

    patterns: list[str]
    files: list[File]
    tokens: int
    column: dict[str, str]

    @property
    def training_tokens(self) -> int:
        """About as many as are not held out."""
        file = self._held_out_file(SHORTEST)
        if file is None:
            fraction = self._held_out_fraction
        else:
            fraction = file.size() / sum(file.size() for file in self.files)
        return int(self.tokens * (1 - fraction))

    @property
    def only_document(self) -> File | None:
        """The file that has nearly all of the text, if it is one document."""
        long = self._long_documents(SHORTEST)
        return long[0] if len(long) == 1 else None

    def held_out(self, length: int) -> dict[str, object]:
        """The key for held-out text, where rows have `length` tokens."""
        file = self._held_out_file(length)
        if file is None:
            return {"validation_fraction": self._held_out_fraction}
        return {"validation_files": [_written(file)]}

    @property
    def _held_out_fraction(self) -> float:
        is_much = len(self.files) >= 100 or self.tokens >= MUCH
        return 0.05 if is_much else 0.2

    def _held_out_file(self, length: int) -> File | None:
        """The smallest of several long documents; a fraction of so few may hold out none."""
        long = self._long_documents(length)
        return long[0] if len(long) > 1 else None

    def _long_documents(self, length: int) -> list[File]:
        """Those of a few files that are one document each and fill a row, the smallest first."""
        if len(self.files) >= 20 or not all(map(_is_one_document, self.files)):
            return []
        row = 2 * length * BYTES_PER_TOKEN
        long = [file for file in self.files if file.size() > row]
        return sorted(long, key=File.size)


def sample_text(
    patterns: list[str],
    home: Path,
    text_column: str | None,
    encoder: TextEncoder | None = None,
) -> Text:
    """Find the text, and estimate its tokens, which the encoder counts where it is known.

    Raises:
        ConfigError, DataError: no text is there, or too little.
    """
    column = {"text_column": text_column} if text_column else {}
    named = PipelineConfig.model_validate({"data": {"files": patterns, **column}})
    data = without_variables(named).data
    files = matching(Files(data, "data"), data.files, "files", NotText(home))
    tokens = sampled_tokens(files, encoder)
    if tokens < FEWEST_SEQUENCES * SHORTEST:
        raise _too_little_text(files, tokens)
    return Text(patterns, files, tokens, column)


def _too_little_text(files: Sequence[File], tokens: int) -> DataError:
    """The error for so few tokens; it names what is wrong with the first file, if anything is."""
    fault = ""
    cure = "name more text"
    if files:
        reason = _first_fault(files[0])
        fault = f" ({files[0]} {reason})" if reason else ""
    if not all(map(_is_one_document, files)):
        cure += ", or with --text-column NAME the field or column that has the text"
    return DataError(
        f"--files: about {tokens:,} tokens of text in {len(files)} file(s){fault}; the smallest "
        f"model needs {FEWEST_SEQUENCES * SHORTEST:,} to learn anything; {cure}."
    )


def _first_fault(file: File) -> str | None:
    """The reason why the file's first record is no text; None: it is text, or cannot be read."""
    try:
        first = next(file.records(), None)
    except Unreadable as fault:
        return str(fault)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return first.reason if isinstance(first, Fault) else None


def sampled_tokens(
    files: Sequence[TextInput], encoder: TextEncoder | None = None
) -> int:
    """Tokens in these files, estimated from the text in some of them.

    The tokens are counted by the encoder, where it is known.
    """
    # Bytes that were read of files, and of the text in them.
    read = 0.0
    text = 0
    found = 0  # bytes of text in all files, also in those that were read in part
    # Bytes of text that the tokenizer encoded, and their tokens.
    encoded = 0
    tokens = 0
    every = max(1, math.ceil(len(files) / SAMPLED_FILES))
    for file in files[::every]:
        file_text = 0
        try:
            size_read, records = _sample(file)
            for record in records:
                record = record if isinstance(record, str) else ""
                if encoder is not None and file_text < ENCODED_BYTES:
                    sample = record[:ENCODED_BYTES]
                    encoded += len(sample.encode())
                    tokens += len(encoder.encode(sample))
                size = len(record.encode())
                file_text += size
                found += size
                if file_text > SAMPLED_BYTES and size_read > READ_WHOLE:
                    break
            else:
                read += size_read
                text += file_text
        except (Unreadable, OSError):  # preprocess names it
            continue
    if not found:
        return 0
    bytes_per_token = encoded / tokens if tokens else BYTES_PER_TOKEN
    text_per_byte = text / read if read else 1.0
    return int(sum(file.size() for file in files) * text_per_byte / bytes_per_token)


def _sample(file: TextInput) -> tuple[float, TextRecords]:
    """Bytes of a part of the file, or of the whole file, and the texts there."""
    spans = file.spans(SAMPLED_BYTES)
    if not spans:
        return file.size(), file.records()
    middle = spans[len(spans) // 2]
    return file.size() / len(spans), chain.from_iterable(file.batches(middle))


def _written(file: File) -> str:
    """The file as a configuration names it."""
    if isinstance(file.path, RemoteFile):
        return file.path.url
    return as_written(file.path)


def _is_one_document(file: File) -> bool:
    return format_read(file.path, file.format).is_document
