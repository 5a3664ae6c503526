"""The preprocess stage: builds what is missing of a dataset artifact and says where it is."""

import errno
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers as tokenizers_library

from configs.errors import DataError, PipelineError
from tasks.artifacts import Busy, Lock, commit, is_complete, move_aside, read_manifest, set_pointer, staging
from tasks.preprocess.arrays import save_array
from tasks.preprocess.chunking import compute_rows, resolve_device
from tasks.preprocess.keys import CHUNKS_VERSION, TOKENS_VERSION, chunks_key, is_validation, tokens_key
from tasks.preprocess.sources import Document, describe, documents
from tasks.preprocess.tokenizers import EOS_ID, encoder_of, token_bytes, train_bpe
from tasks.preprocess.tokens import batches, dtype_for, write_split

log = logging.getLogger("infini_llama.preprocess")
FOREVER = 10.0**9


def plan(data: dict, home: str) -> dict[str, Any]:
    """What `preprocess` would build, known before any work.

    Returns:
        {"key", "chunks_key": 64 hex digits each; "name": folder below datasets/; "documents"; "bytes"}.

    Raises:
        DataError: no text, or unreadable text.
    """
    return _plan(data, documents(data))


def _plan(data: dict, found: list[Document]) -> dict[str, Any]:
    if not found:
        raise DataError("every file that data.files matches is empty; there is no text to train on.")
    tokens = tokens_key(data, found)
    size = sum(document.size for document in found)
    return {
        "key": tokens,
        "chunks_key": chunks_key(data, tokens),
        "name": f"{data['source']}-{tokens[:12]}",
        "documents": len(found),
        "bytes": size,
    }


def lookup(data: dict, home: str) -> dict[str, Any] | None:
    """The reference of the complete artifact for this text and these settings, None where something is missing."""
    planned = plan(data, home)
    folder = Path(home) / "datasets" / planned["name"]
    chunks = folder / "chunks" / planned["chunks_key"][:12]
    if is_complete(folder, "dataset") and is_complete(chunks, "chunks"):
        return _reference(Path(home), folder, chunks, built=[])
    return None


def preprocess(data: dict, home: str) -> dict[str, Any]:
    """Builds the token level and the chunk level where they are missing; the same input gives the same bytes.

    Two builders of one key: one builds, the other waits for it. A build that was killed leaves only a temporary folder,
    which the next one removes.

    Returns:
        the reference that the other stages take: path below home, digests, and the facts of both splits.

    Raises:
        DataError: no text, unreadable text, or too little for one row.
        PipelineError: no space left; nothing half-written is believed.
    """
    found = documents(data)
    planned = _plan(data, found)
    folder = Path(home) / "datasets" / planned["name"]
    chunks = folder / "chunks" / planned["chunks_key"][:12]
    built = []
    with _space(folder), _alone(Path(home) / "locks" / f"dataset-{planned['key'][:12]}.lock"):
        if not is_complete(chunks, "chunks"):
            resolve_device(data["device"])  # a device that is not there is refused before the work, not after it
        if not is_complete(folder, "dataset"):
            _clear(folder)
            _build_tokens(data, found, folder, planned["key"])
            built.append("tokens")
        if not is_complete(chunks, "chunks"):
            _clear(chunks)
            _build_chunks(data, folder, chunks, planned["chunks_key"])
            built.append("chunks")
        set_pointer(folder.parent, "latest", folder.name)
    reference = _reference(Path(home), folder, chunks, built)
    log.info("dataset %s: %s", folder.name, "built " + " and ".join(built) if built else "complete, nothing to do")
    return reference


def _clear(folder: Path) -> None:
    """Under the lock: removes what killed builds of this artifact left, and moves a damaged one aside."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left)
    if folder.exists():
        log.warning("%s is not complete; it was moved to %s and is built anew", folder, move_aside(folder))


def _build_tokens(data: dict, found: list[Document], folder: Path, key: str) -> None:
    held_out = [document for document in found if is_validation(document, data["validation_fraction"])]
    training = [document for document in found if not is_validation(document, data["validation_fraction"])]
    for split, members in (("training", training), ("validation", held_out)):
        if not members:
            raise DataError(
                f"{len(found)} document(s) leave none for {split} at data.validation_fraction={data['validation_fraction']}; "
                "add files, split them into smaller ones, or change the fraction."
            )
    with _fresh(folder) as staged:
        tokenizer = train_bpe(_read(training), **data["tokenizer"])
        (staged / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        save_array(staged / "token_bytes.npy", token_bytes(tokenizer))
        encoder, size = encoder_of(tokenizer), data["shard_size"]
        content = {
            "vocab_size": tokenizer.get_vocab_size(),
            "dtype": dtype_for(tokenizer.get_vocab_size()).name,
            "eos_id": EOS_ID,
            "text_yields_special_tokens": False,
            "train": write_split(staged / "train", training, encoder, size, "training text"),
            "validation": write_split(staged / "validation", held_out, encoder, size, "validation text"),
        }
        meta = describe(data) | {
            "key": key,
            "data": data,
            "infini_llama": version("infini-llama"),
            "tokenizers": tokenizers_library.__version__,
        }
        commit(staged, folder, "dataset", TOKENS_VERSION, meta, content)


def _read(training: list[Document]) -> Iterator[str]:
    done, total = 0, sum(document.size for document in training)
    for texts, size in batches(training):
        yield from texts
        done += size
        progress = {"done": round(done / 1e6, 1), "total": round(total / 1e6, 1), "unit": "MB"}
        log.info("reading text for the tokenizer", extra={"progress": progress})
    log.info("learning the tokenizer's merges")


def _build_chunks(data: dict, folder: Path, chunks: Path, key: str) -> None:
    content = read_manifest(folder, "dataset")["content"]
    length = data["sequence_length"]
    for split in ("train", "validation"):
        if content[split]["tokens"] <= length:
            raise DataError(
                f"the {split} text has {content[split]['tokens']} tokens, fewer than one row of data.sequence_length={length} "
                "and its last label; shorten the rows, add text, or change data.validation_fraction."
            )
    device, required = resolve_device(data["device"]), data["device"] != "auto"
    rows = {}
    with _fresh(chunks) as staged:
        for split in ("train", "validation"):
            table = compute_rows(content[split]["tokens"], length, device, required)
            save_array(staged / f"{split}.rows.npy", table)
            rows[split] = len(table)
        meta = {"key": key, "device": device, "infini_llama": version("infini-llama")}
        facts = {"strategy": data["strategy"], "sequence_length": length, "rows": rows}
        commit(staged, chunks, "chunks", CHUNKS_VERSION, meta, facts)


def _reference(home: Path, folder: Path, chunks: Path, built: list[str]) -> dict[str, Any]:
    dataset, table = read_manifest(folder, "dataset"), read_manifest(chunks, "chunks")
    content, rows = dataset["content"], table["content"]["rows"]

    def facts(split: str) -> dict[str, Any]:
        names = ("documents", "tokens", "bytes", "unigram_entropy_bits")
        return {name: content[split][name] for name in names} | {"rows": rows[split]}

    return {
        "path": folder.relative_to(home).as_posix(),
        "digest": dataset["digest"],
        "chunks": chunks.name,
        "chunks_digest": table["digest"],
        "built": built,
        "sequence_length": table["content"]["sequence_length"],
        "vocab_size": content["vocab_size"],
        "train": facts("train"),
        "validation": facts("validation"),
    }


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of one key; a second builder waits, however long the first one takes, and then uses what it built."""
    with ExitStack() as held:
        try:
            held.enter_context(Lock(path))
        except Busy as other:
            log.info("another process builds this dataset; waiting for it (%s)", other)
            held.enter_context(Lock(path, wait=FOREVER))
        yield


@contextmanager
def _fresh(target: Path) -> Iterator[Path]:
    """A staging folder for `target` that an error does not leave behind; what a kill leaves, `_clear` removes."""
    staged = staging(target)
    try:
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


@contextmanager
def _space(folder: Path) -> Iterator[None]:
    """Turns a full disk into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise PipelineError(
                f"no space to write the dataset in {folder.parent} ({error.strerror}); free space and run the same command again."
            ) from error
        raise
