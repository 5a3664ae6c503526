"""The checks of a dataset: quick ones always, checksums where they are affordable, every token when asked."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from configs.errors import DataError
from tasks.artifacts import Damaged, check, file_checksum, read_manifest
from tasks.preprocess.reader import TokenReader, map_list
from tasks.preprocess.tokenizers import EOS_ID, encoder_of, token_bytes

VERIFIER_VERSION = 1
SPLITS = ("train", "validation")
DECODED = 16  # documents a split that are decoded and encoded again


def verify(reference: dict, home: str, level: str, full_below: int) -> dict[str, Any]:
    """Checks both levels of the dataset `reference` (what `preprocess` returned).

    Args:
        level: "quick" or "deep".
        full_below: bytes up to which "quick" also checks every checksum.

    Returns:
        a report: {"level", "ok", "checks": [{"name", "detail"}], "checked_bytes", "seconds", "verify_on_read"}; the last says
        whether shards are still to be checked at their first read.

    Raises:
        DataError: names the damaged file and what to do.
    """
    started = time.perf_counter()
    dataset = Path(home) / reference["path"]
    chunks = dataset / "chunks" / reference["chunks"]
    done: list[dict[str, str]] = []

    def run(name: str, action: Callable[[], str]) -> None:
        try:
            done.append({"name": name, "detail": action()})
        except DataError as fault:
            raise DataError(
                f"{fault} Training does not start on it: remove the folder {dataset} and run the same command again, which builds it anew."
            ) from None

    total = sum(file["size"] for file in _manifest(dataset, run)["files"].values())
    checksums = level == "deep" or total <= full_below
    run("files", lambda: _files(dataset, chunks, checksums))
    run("digests", lambda: _digests(dataset, chunks, reference))
    run("tokenizer", lambda: _tokenizer(dataset))
    if level == "deep":
        run("tokens", lambda: _tokens(dataset))
        run("rows", lambda: _rows(dataset, reference["chunks"]))
        run("text", lambda: _text(dataset))
        run("leakage", lambda: _leakage(dataset))
    return {
        "level": level,
        "ok": True,
        "checks": done,
        "checked_bytes": total if checksums else 0,
        "seconds": round(time.perf_counter() - started, 3),
        "verify_on_read": not checksums,
    }


def _manifest(dataset: Path, run: Callable[[str, Callable[[], str]], None]) -> dict[str, Any]:
    run("manifest", lambda: f"{len(read_manifest(dataset, 'dataset')['files'])} files")
    return read_manifest(dataset, "dataset")


def _files(dataset: Path, chunks: Path, checksums: bool) -> str:
    check(dataset, "dataset", checksums)
    check(chunks, "chunks", checksums)
    return "every checksum" if checksums else "every size"


def _digests(dataset: Path, chunks: Path, reference: dict) -> str:
    found = read_manifest(dataset, "dataset")["digest"], read_manifest(chunks, "chunks")["digest"]
    if found != (reference["digest"], reference["chunks_digest"]):
        raise Damaged(f"{dataset} is not the dataset that preprocess returned (its digest differs).")
    return found[0]


def _tokenizer(dataset: Path) -> str:
    manifest = read_manifest(dataset, "dataset")
    path = dataset / "tokenizer.json"
    if file_checksum(path) != manifest["files"]["tokenizer.json"]["checksum"]:
        raise Damaged(f"{path} is not the tokenizer this dataset was made with (checksum differs).")
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() != manifest["content"]["vocab_size"]:
        raise Damaged(
            f"{path} has {tokenizer.get_vocab_size()} tokens; the manifest says {manifest['content']['vocab_size']}."
        )
    if not np.array_equal(token_bytes(tokenizer), np.load(dataset / "token_bytes.npy", allow_pickle=False)):
        raise Damaged(f"{dataset / 'token_bytes.npy'} does not belong to the tokenizer.")
    return f"{tokenizer.get_vocab_size()} tokens"


def _tokens(dataset: Path) -> str:
    content = read_manifest(dataset, "dataset")["content"]
    for split in SPLITS:
        for shard in content[split]["shards"]:
            path = dataset / shard["file"]
            offsets, values = map_list(path)
            if len(values) != shard["tokens"] or len(offsets) != shard["documents"] + 1:
                raise Damaged(
                    f"{path} has {len(values)} tokens in {len(offsets) - 1} documents; the manifest says otherwise."
                )
            if values.max() >= content["vocab_size"]:
                raise Damaged(f"{path} has token {values.max()}, beyond the vocabulary of {content['vocab_size']}.")
            ends = offsets[1:] - 1
            if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) <= 0).any():
                raise Damaged(f"{path} has document offsets that do not ascend from 0 to its end.")
            if (values[ends] != EOS_ID).any() or int((values == EOS_ID).sum()) != len(ends):
                raise Damaged(f"{path} has documents that do not end with the one end-of-text token they should have.")
    return f"{content['train']['tokens'] + content['validation']['tokens']:,} tokens below {content['vocab_size']}"


def _rows(dataset: Path, chunks: str) -> str:
    content = read_manifest(dataset, "dataset")["content"]
    counts = []
    for split in SPLITS:
        reader = TokenReader(dataset, chunks, split)
        if len(reader) and (
            reader.starts[0] < 0 or reader.starts.max() + reader.sequence_length >= content[split]["tokens"]
        ):
            raise Damaged(f"{dataset}/chunks/{chunks}/{split}.rows.npy points outside the tokens of {split}.")
        counts.append(len(reader))
    return f"{counts[0]:,} training and {counts[1]:,} validation rows"


def _documents(dataset: Path, split: str) -> list[np.ndarray]:
    shards = read_manifest(dataset, "dataset")["content"][split]["shards"]
    mapped = [map_list(dataset / shard["file"]) for shard in shards]
    return [values[start:end] for offsets, values in mapped for start, end in pairwise(offsets)]


def _text(dataset: Path) -> str:
    encoder = encoder_of(Tokenizer.from_file(str(dataset / "tokenizer.json")))
    for split in SPLITS:
        documents = _documents(dataset, split)
        for number in np.unique(np.linspace(0, len(documents) - 1, DECODED).astype(int)):
            ids = documents[number][:-1].tolist()
            if encoder.encode(encoder.decode(ids, skip_special_tokens=False), add_special_tokens=False).ids != ids:
                raise Damaged(f"document {number} of {split} in {dataset} does not survive decoding and encoding.")
    return f"{DECODED} documents a split decoded and encoded again"


def _leakage(dataset: Path) -> str:
    training = {document.tobytes() for document in _documents(dataset, "train")}
    leaked = sum(document.tobytes() in training for document in _documents(dataset, "validation"))
    if leaked:
        raise Damaged(f"{leaked} validation document(s) of {dataset} are also in the training text.")
    return "no validation document is in the training text"
