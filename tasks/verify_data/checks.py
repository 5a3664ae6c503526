"""The checks of a dataset.

Quick checks are made always, checksums are compared where they are affordable or the check is deep,
and every token if it is deep.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from pyarrow.lib import ArrowException
from tokenizers import Tokenizer
from xxhash import xxh3_128_digest

from infini_llama.configs.errors import DataError, tokenizer_faults
from infini_llama.tasks.machine import Machine, usable_cores
from infini_llama.tasks.preprocess.rows.tables import (
    build_table,
    lengths_by_source,
    row_table_key,
)
from infini_llama.tasks.preprocess.tokens.dataset import first_alike
from infini_llama.tasks.preprocess.tokens.shards import (
    entropy_bits,
    map_array,
    map_shard,
    map_targets,
    token_counts,
    unpack_targets,
)
from infini_llama.tasks.preprocess.tokens.targets import ByteSpan, encode_spans
from infini_llama.tasks.preprocess.tokens.units import DOCUMENTS
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.dataset import Check, DatasetRef, VerifyReport
from infini_llama.tasks.records.manifest import (
    SPLITS,
    DatasetContent,
    Inexpressible,
    Shard,
    SourceRows,
    SplitContent,
)
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    Damaged,
    check,
    read_dataset,
    read_manifest,
    read_row_table,
    read_unit,
    verify_checksum,
)
from infini_llama.tasks.storage.dataset_files import (
    REPAIR,
    TOKEN_BYTES,
    TOKENIZER,
    document_bytes_file,
)
from infini_llama.tasks.tokenizers.encoder import encoder_of, reference
from infini_llama.tasks.tokenizers.tokenizer import token_bytes

MOST_THREADS = 16  # a disk gives no more to more
DECODED = 16  # documents a split that are decoded and encoded again
log = logging.getLogger("infini_llama.verify")
# Bytes of a dataset; of a larger one, each shard is checked when it is first opened.
FULL_BELOW = 20 * 10**9


@dataclass
class Progress:
    """The checks of one dataset, as they pass."""

    total: int
    done: list[Check] = field(default_factory=list)

    def run(
        self,
        name: str,
        action: Callable[[], str],
        suspect: Path,
        cure: str = REPAIR,
    ) -> None:
        """Run a check of the folder `suspect`; `action` returns what it found, for people.

        Args:
            cure: what to do where it fails.

        Raises:
            DataError: the check fails; the message states what to do.
        """
        progress = Reached(len(self.done), self.total, "checks")
        log.info("checking %s", name, extra={"progress": progress})
        try:
            self.done.append(Check(name=name, detail=action()))
        except (DataError, ValueError, ArrowException) as raised:
            # Bytes that their manifest vouches for, and that yet are no array, table or JSON:
            # damaged as well, and never unpickled.
            words = (
                f"{suspect} cannot be read as a dataset ({type(raised).__name__} in '{name}'): "
                f"{raised}"
            ).rstrip(".")
            fault = raised if isinstance(raised, DataError) else f"{words}."
            raise DataError(f"{fault} Training does not start. {cure}") from None

    def finish(self) -> None:
        """Log that all checks passed."""
        progress = Reached(self.total, self.total, "checks")
        log.info("checked the dataset", extra={"progress": progress})


def verify(
    reference: DatasetRef,
    home: Path,
    level: str,
    full_below: int = FULL_BELOW,
) -> VerifyReport:
    """Check both levels of the dataset `reference` (what `preprocess` returned).

    Args:
        level: "quick" or "deep".
        full_below: bytes up to which "quick" also checks every checksum.

    Raises:
        DataError: names the damaged file and what to do.
    """
    started = time.perf_counter()
    dataset = home / reference.path
    tables = {
        dataset / ROW_TABLES / table.row_table: table.row_table_digest
        for table in reference.row_tables
    }
    progress = Progress(6 + 3 * len(tables) if level == "deep" else 3 + 2 * len(tables))
    run = progress.run
    run("manifest of the tokens", partial(_manifest, dataset), dataset)
    for table in tables:
        run("manifest of the rows", partial(_manifest_of_rows, dataset, table), table)
    manifests = [
        read_manifest(dataset, "dataset"),
        *(read_manifest(table, ROW_TABLES) for table in tables),
    ]
    files = [file for manifest in manifests for file in manifest.files.values()]
    total = sum(file.size for file in files)
    checksums = level == "deep" or total <= full_below
    run(
        "token files",
        partial(_files, dataset, "dataset", checksums, reference.digest),
        dataset,
    )
    for table, digest in tables.items():
        run("row files", partial(_files, table, ROW_TABLES, checksums, digest), table)
    run("tokenizer", partial(_tokenizer, dataset), dataset)
    if level == "deep":
        cure = _cure_of_contents(dataset, home)
        run("tokens", partial(_tokens, dataset), dataset, cure)
        for table in tables:
            run("rows", partial(_rows, dataset, table), table, cure)
        run("leakage", partial(_leakage, dataset), dataset, cure)
        run("text", partial(_text, dataset, home / "units"), dataset, cure)
    progress.finish()
    return VerifyReport(
        level=level,
        checks=tuple(progress.done),
        files=len(files),
        checked_bytes=total if checksums else 0,
        seconds=round(time.perf_counter() - started, 3),
        verify_on_read=not checksums,
    )


def _cure_of_contents(dataset: Path, home: Path) -> str:
    """What to do where files are as they were written, but wrong."""
    recipe = read_dataset(dataset).meta.recipe
    return (
        "Its files are as they were written, so --repair rebuilds none: remove "
        f"{dataset} and {home / 'units' / recipe}, and build it again."
    )


def _manifest(dataset: Path) -> str:
    """Check the manifest of the tokens, and the key in the folder's name.

    A folder with a name that the user chose may hold any dataset; one named after a key must hold
    that one.
    """
    manifest = read_dataset(dataset)
    key = manifest.meta.key
    named = re.search("-([0-9a-f]{12})$", dataset.resolve().name)
    if named and not key.startswith(named[1]):
        raise Damaged(
            f"{dataset} holds the dataset with key {key[:12]}, which is not the key in its name."
        )
    return f"{len(manifest.files)} files"


def _manifest_of_rows(dataset: Path, table: Path) -> str:
    manifest = read_row_table(table)
    key = row_table_key(manifest.content, read_dataset(dataset).meta.key)[:12]
    if key != table.name:
        raise Damaged(
            f"{table} holds the row table with key {key}, which is not its name."
        )
    return f"{table.name}: {len(manifest.files)} files"


def _files(
    folder: Path,
    kind: str,
    checksums: bool,
    digest: str,
) -> str:
    actual = check(folder, kind, checksums).digest
    if actual != digest:
        raise Damaged(
            f"{folder} is not what preprocess returned: its digest is {actual}, and {digest} was "
            "expected."
        )
    return f"{folder.name}: every {'checksum' if checksums else 'size'}; {digest}"


def _tokenizer(dataset: Path) -> str:
    manifest = read_dataset(dataset)
    path = dataset / TOKENIZER
    for file in (path, dataset / TOKEN_BYTES):
        verify_checksum(file, manifest.files[file.name].checksum)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises nothing narrower
        raise Damaged(f"{path} is not a tokenizer ({fault}).") from None
    if tokenizer.get_vocab_size() != manifest.content.vocab_size:
        raise Damaged(
            f"{path} has {tokenizer.get_vocab_size()} tokens; the manifest says "
            f"{manifest.content.vocab_size}."
        )
    stored = np.load(dataset / TOKEN_BYTES, allow_pickle=False)
    split_special_tokens = not manifest.content.text_yields_special_tokens
    if not np.array_equal(token_bytes(tokenizer, split_special_tokens), stored):
        raise Damaged(f"{dataset / TOKEN_BYTES} does not belong to the tokenizer.")
    return f"{tokenizer.get_vocab_size()} tokens"


def _tokens(dataset: Path) -> str:
    content = read_dataset(dataset).content
    for split in SPLITS:
        _check_split(dataset, split, content)
        for source in content[split].sources:
            shards = [
                shard for shard in content[split].shards if shard.source == source.name
            ]
            documents = sum(shard.documents for shard in shards)
            tokens = sum(shard.tokens for shard in shards)
            if (documents, tokens) != (source.documents, source.tokens):
                raise Damaged(
                    f"the shards of '{source.name}' in {dataset / split} do not add up to what the "
                    "manifest says of it."
                )
    return f"{content.train.tokens + content.validation.tokens:,} tokens below {content.vocab_size}"


def _check_split(dataset: Path, split: str, content: DatasetContent) -> None:
    """Compare every token and offset of a split with the manifest.

    Several shards are checked at a time: numpy releases the interpreter.
    """
    facts = content[split]
    counts = np.zeros(content.vocab_size, dtype=np.int64)
    lengths: list[np.ndarray] = []
    documents = accumulate((shard.documents for shard in facts.shards), initial=0)
    tokens = accumulate((shard.tokens for shard in facts.shards), initial=0)
    threads = min(MOST_THREADS, usable_cores(Machine()))
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        checked = pool.map(
            partial(_check_shard, dataset, content), facts.shards, documents, tokens
        )
        for number, (shard_lengths, shard_counts) in enumerate(checked, start=1):
            lengths.append(shard_lengths)
            counts += shard_counts
            progress = Reached(number, len(facts.shards), "shards")
            log.info("checking the tokens of %s", split, extra={"progress": progress})
    if content.has_document_bytes:
        _check_document_bytes(dataset, split, facts)
    every = np.concatenate(lengths)
    names = ("documents", "tokens", "shortest_document", "longest_document")
    counted = (
        len(every),
        int(every.sum()),
        int(every.min()),
        int(every.max()),
    )
    stated = tuple(getattr(facts, name) for name in names)
    stated_bits = facts.unigram_entropy_bits
    if counted != stated or not np.isclose(
        entropy_bits(counts), stated_bits, rtol=1e-9, atol=0
    ):
        raise Damaged(
            f"{dataset / split} has {', '.join(names)} of {counted} and an entropy of "
            f"{entropy_bits(counts)} bits per token; the manifest says {stated} and "
            f"{facts.unigram_entropy_bits}."
        )


def _check_document_bytes(dataset: Path, split: str, facts: SplitContent) -> None:
    path = dataset / document_bytes_file(split)
    sizes = map_array(path)
    counted = (len(sizes), int(sizes.sum()))
    stated = (facts.documents, facts.bytes)
    if counted != stated:
        raise Damaged(
            f"{path} has {counted[0]:,} documents of {counted[1]:,} bytes; the manifest says "
            f"{stated[0]:,} of {stated[1]:,}."
        )


def _check_shard(
    dataset: Path,
    content: DatasetContent,
    shard: Shard,
    documents: int,
    tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens per document, int64 [documents], and how often each token counts, int64 [vocab_size].

    Args:
        documents, tokens: in the shards before this one, as the manifest says.
    """
    path = dataset / shard.file
    offsets, values = map_shard(path)
    names = ("documents", "tokens", "first_document", "first_token")
    stated = (shard.documents, shard.tokens, shard.first_document, shard.first_token)
    counted = (len(offsets) - 1, len(values), documents, tokens)
    if counted != stated:
        of_shard = dict(zip(names, counted, strict=True))
        of_manifest = dict(zip(names, stated, strict=True))
        raise Damaged(f"{path} has {of_shard}; the manifest says {of_manifest}.")
    if values.dtype != content.dtype:
        raise Damaged(
            f"{path} holds {values.dtype}; the manifest says {content.dtype}."
        )
    if values.max() >= content.vocab_size:
        raise Damaged(
            f"{path} has token {values.max()}, beyond the vocabulary of {content.vocab_size}."
        )
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(values) or (lengths <= 0).any():
        raise Damaged(
            f"{path} has document offsets that do not ascend from 0 to its end."
        )
    if not _end_once(content, values, offsets):
        raise Damaged(
            f"{path} has documents that do not end with the one end-of-text token they should have."
        )
    counted_values = values
    if content.has_loss_mask:
        counted_values = values[unpack_targets(map_targets(path), 0, len(values))]
    return lengths, token_counts(counted_values, content.vocab_size)


def _end_once(content: DatasetContent, values: np.ndarray, offsets: np.ndarray) -> bool:
    """Whether each document ends with the end-of-text token, and has no other one.

    It may have others where text yields special tokens.
    """
    is_end = values == content.eos_id
    ends = offsets[1:] - 1
    if content.text_yields_special_tokens:
        return bool(is_end[ends].all())
    return np.array_equal(np.flatnonzero(is_end), ends)


def _rows(dataset: Path, table: Path) -> str:
    splits = read_dataset(dataset).content
    content = read_row_table(table).content
    for split in SPLITS:
        lengths = lengths_by_source(dataset, splits[split].shards)
        expected = build_table(
            lengths, content.strategy, content.sequence_length, content.stride
        )
        for name, array in expected.arrays.items():
            stored = map_array(table / f"{split}.{name}.npy")
            if stored.dtype != array.dtype or not np.array_equal(stored, array):
                raise Damaged(
                    f"{table / f'{split}.{name}.npy'} is not the row table of the tokens of "
                    f"{split}."
                )
        rows = content.rows[split]
        stated = (
            content.sources[split]
            if content.sources
            else (SourceRows(name="", rows=rows),)
        )
        if expected.rows != rows or expected.sources != stated:
            counted = {source.name: source.rows for source in expected.sources}
            written = {source.name: source.rows for source in stated}
            raise Damaged(
                f"{table} has {expected.rows} rows of {split}, {counted}; its manifest says "
                f"{rows}, {written}."
            )
    return (
        f"{table.name}: {content.rows.train:,} training and {content.rows.validation:,} "
        "validation rows"
    )


def _shard_of(shards: Sequence[Shard], number: int) -> Shard:
    """The shard of a split that has this document."""
    return next(shard for shard in reversed(shards) if shard.first_document <= number)


@dataclass(frozen=True)
class _Document:
    """A document of a dataset without its end.

    Attributes:
        ids: its tokens.
        targets: which of them count, bool [tokens].
    """

    ids: np.ndarray
    targets: np.ndarray


def _document(
    dataset: Path,
    content: DatasetContent,
    shard: Shard,
    number: int,
) -> _Document:
    path = dataset / shard.file
    offsets, values = map_shard(path)
    place = number - shard.first_document
    begin = int(offsets[place])
    end = int(offsets[place + 1]) - 1
    targets = np.ones(end - begin, dtype=bool)
    if content.has_loss_mask:
        targets = unpack_targets(map_targets(path), begin, end)
    return _Document(values[begin:end], targets)


def _text(dataset: Path, units: Path) -> str:
    """Compare with the text itself.

    The bytes that all tokens stand for are compared with those of the text, and hashes of some
    documents.
    """
    manifest = read_dataset(dataset)
    content = manifest.content
    tokenizer = Tokenizer.from_file(str(dataset / TOKENIZER))
    encoder = encoder_of(tokenizer, not content.text_yields_special_tokens)
    meta = manifest.meta
    if not content.lossless:
        return _sentence_of_loss(meta.inexpressible)
    sizes = np.load(dataset / TOKEN_BYTES, allow_pickle=False).astype(np.int64)
    unit_of = _units_by_stream(units / meta.recipe) if meta.recipe else {}
    has_whole_table = cache(_has_whole_table)
    hashes = defaultdict[Path, set[bytes]](set)
    documents = 0
    unknown = 0
    for split in SPLITS:
        _check_bytes(dataset, split, content, sizes)
        places = np.linspace(0, content[split].documents - 1, DECODED).astype(int)
        for number in np.unique(places).tolist():
            shard = _shard_of(content[split].shards, number)
            text = _text_of(encoder, _document(dataset, content, shard, number), sizes)
            if text is None:
                raise Damaged(
                    f"document {number} of {split} in {dataset} does not survive decoding and "
                    "encoding."
                )
            documents += 1
            unit = unit_of.get(manifest.files[shard.file].checksum)
            if unit and has_whole_table(unit):
                hashes[unit].add(xxh3_128_digest(text.encode()))
            else:
                unknown += 1
    unlike = sum(
        len(of_unit - _known(unit / DOCUMENTS, of_unit))
        for unit, of_unit in hashes.items()
    )
    if unlike:
        raise Damaged(
            f"{unlike} of {documents} documents of {dataset} are no text that was read: their "
            "hashes differ."
        )
    of_hashes = _sentence_of_hashes(documents, unknown)
    return f"every byte counted; {documents} documents decoded and encoded again{of_hashes}"


def _sentence_of_hashes(documents: int, unknown: int) -> str:
    why = "units were removed, damaged or used in part"
    if unknown == documents:
        return f"; their hashes are not compared, since their {why}"
    words = f", but not those of {unknown}, whose {why}" if unknown else ""
    return f", with the hashes of the text that was read{words}"


def _sentence_of_loss(lost: Inexpressible) -> str:
    words = "has tokens for all of it"
    if lost.files:
        words = f"has no token for {100 * lost.share:.2g} % of it"
    return f"this tokenizer changes text, so decoding need not give it back; it {words}"


def _check_bytes(
    dataset: Path,
    split: str,
    content: DatasetContent,
    sizes: np.ndarray,
) -> None:
    """Compare the bytes of a split's text with those that its tokens stand for.

    Args:
        sizes: bytes of each token, int64 [vocab_size].
    """
    shards = (map_shard(dataset / shard.file)[1] for shard in content[split].shards)
    counts = sum(
        (token_counts(values, content.vocab_size) for values in shards),
        np.zeros(content.vocab_size, dtype=np.int64),
    )
    counts[content.eos_id] -= content[split].documents  # whose ends stand for no text
    size = int(counts @ sizes)
    if size != content[split].bytes:
        raise Damaged(
            f"the tokens of {split} in {dataset} stand for {size:,} bytes of text, and it has "
            f"{content[split].bytes:,}."
        )


def _text_of(encoder: Tokenizer, document: _Document, sizes: np.ndarray) -> str | None:
    """The text of a document; None where encoding it again gives other tokens or targets.

    Args:
        sizes: bytes of each token, int64 [vocab_size].
    """
    with tokenizer_faults():
        text = encoder.decode(document.ids.tolist(), skip_special_tokens=False)
        again = encode_spans(
            reference(encoder), [text.encode()], [_spans(document, sizes)]
        )
    is_same = np.array_equal(again.ids, document.ids)
    has_same_targets = np.array_equal(again.targets[:-1], document.targets)
    return text if is_same and has_same_targets else None


def _spans(document: _Document, sizes: np.ndarray) -> list[ByteSpan]:
    """The bytes of a document's text whose tokens count."""
    ends = np.append(0, sizes[document.ids].cumsum())
    changes = np.flatnonzero(np.diff(document.targets, prepend=False, append=False))
    bounds = ends[changes].tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _units_by_stream(recipe: Path) -> dict[str, Path]:
    """The units of a recipe, by the checksums of their streams.

    A shard with all documents of a unit has the same checksum.
    """
    units = dict[str, Path]()
    for unit in recipe.glob("[!.]*/"):
        with suppress(Damaged):
            units |= {
                entry.checksum: unit
                for name, entry in read_unit(unit, unit.name).files.items()
                if name.endswith(".arrow")
            }
    return units


def _has_whole_table(unit: Path) -> bool:
    """Whether a unit's table of documents has the bytes of its manifest."""
    try:
        entry = read_unit(unit, unit.name).files[DOCUMENTS]
        verify_checksum(unit / DOCUMENTS, entry.checksum)
    except Damaged as fault:
        log.warning("%s The hashes of its documents are not compared.", fault)
        return False
    return True


def _known(table: Path, hashes: set[bytes]) -> set[bytes]:
    """The hashes among these that a unit's table of documents has."""
    leading = np.frombuffer(b"".join(hashes), "<u8")[::2]
    of_unit = np.ascontiguousarray(map_array(table)["hash"])
    alike = np.isin(of_unit.view("<u8")[:, 0], leading)
    return {bytes(hash) for hash in of_unit[alike]} & hashes


def _leakage(dataset: Path) -> str:
    tables = [_hashes(dataset, split) for split in reversed(SPLITS)]  # validation first
    held_out = len(tables[0])
    pairs = first_alike(tables, sum(map(len, tables)))
    leaked = sum(
        int(((numbers >= held_out) & (first < held_out)).sum())
        for numbers, first in pairs
    )
    if not read_dataset(dataset).content.lossless:
        # The split is by text, and this tokenizer gives several texts the same tokens ("The",
        # "the").
        return (
            f"{leaked} training document(s) have the tokens of a validation document; this "
            "tokenizer changes text"
        )
    if leaked:
        raise Damaged(
            f"{leaked} training document(s) of {dataset} are also in its validation text."
        )
    return "no training document is in the validation text"


def _hashes(dataset: Path, split: str) -> np.ndarray:
    """A hash of the tokens of each document of a split, uint8 [documents, 16]."""
    hashes = list[bytes]()
    for shard in read_dataset(dataset).content[split].shards:
        offsets, values = map_shard(dataset / shard.file)
        hashes += [
            xxh3_128_digest(values[start:end].tobytes())
            for start, end in pairwise(offsets)
        ]
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16)
