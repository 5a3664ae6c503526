"""Bits per byte divide by the bytes of the text that targets stand for, with every tokenizer."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError
from infini_llama.tasks.evaluate.stage import evaluate
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.preprocess.tokens.stream import share_bytes
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.tokenizers.tokenizer import token_bytes
from infini_llama.tasks.train.worker.callbacks.evaluation import ValidationSet
from infini_llama.tasks.train.worker.strategies.native import LossModule
from infini_llama.tasks.verify_data.checks import verify
from support.texts import write_lines
from support.tokenizer_kinds import TEXTS, of_kind
from support.trained_runs import trained_run

LOSSY = [
    "gemma",
    "blanks as bytes",
    "llama2",
    "bert",
    "gpt1",
    "t5",
    "unigram with bytes",
]
KINDS = ["byte-level bpe", *LOSSY]
PACKING = [{"packing": name} for name in ("concat", "padded", "best_fit")]
PACKING += [{"packing": "window", "stride": 5}]


def tokenizer_of(kind: str) -> Tokenizer:
    """One of the usual kinds, or one with byte fallback in whose vocabulary no token has a blank."""
    if kind != "blanks as bytes":
        return of_kind(kind)
    fields = json.loads(of_kind("gemma").to_str())
    special = {token["content"] for token in fields["added_tokens"]}
    pieces = fields["model"]["vocab"]
    kept = [
        piece
        for piece in pieces
        if piece in special or len(piece) == 1 or piece[0] == "<"
    ]
    fields["model"]["vocab"] = {
        piece: number
        for number, piece in enumerate(piece for piece in kept if "▁" not in piece)
    }
    fields["model"]["merges"] = []
    for token in fields["added_tokens"]:
        token["id"] = fields["model"]["vocab"][token["content"]]
    return Tokenizer.from_str(json.dumps(fields))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Documents of several lengths, of blanks alone, and with letters that take several bytes."""
    draw = np.random.default_rng(0)
    words = " ".join(TEXTS[:4]).split()
    lines = [" ".join(draw.choice(words, size=draw.integers(1, 60))) for _ in range(80)]
    lines += ["   ", "Die   Straße", f"{lines[0]}\n\n{lines[1]}"]
    return Path(write_lines(tmp_path_factory.mktemp("texts") / "texts.jsonl", lines))


def sizes_of(texts: Path) -> list[int]:
    lines = texts.read_text(encoding="utf-8").splitlines()
    return [len(json.loads(line)["text"].encode()) for line in lines]


@pytest.fixture
def prepared(data, texts, tmp_path):
    """prepared(kind, **settings): the settings of a dataset of the texts, and its reference."""

    def prepare(kind: str, **changes: object):
        path = tmp_path / f"{kind}.json"
        tokenizer_of(kind).save(str(path))
        settings = data(files=[str(texts)], tokenizer={"path": str(path)}, **changes)
        return settings, preprocess(settings, tmp_path)

    return prepare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_units")
def test_the_tokens_of_a_document_stand_for_the_bytes_of_its_text(
    prepared, texts, tmp_path, kind
):
    _, reference = prepared(kind)
    verify(reference, tmp_path, "deep")
    folder = tmp_path / reference.path
    found = list[int]()
    for split in ("train", "validation"):
        stream = TokenReader(folder, reference.row_table, split).stream
        assert len(stream.paths) > 1
        sizes = stream.text_bytes(0, stream.ends[-1])
        offsets = stream.document_offsets()
        found += np.add.reduceat(sizes, offsets[:-1]).tolist()
        assert sizes.sum() == read_dataset(folder).content[split].bytes
        assert (sizes >= 0).all()
        draw = np.random.default_rng(1)
        for _ in range(50):
            start, end = sorted(draw.integers(0, len(sizes), size=2).tolist())
            assert (
                stream.text_bytes(start, end - start).tolist()
                == sizes[start:end].tolist()
            )
        if kind not in LOSSY:
            values = np.concatenate([map_shard(path)[1] for path in stream.paths])
            assert (
                sizes.tolist() == token_bytes(tokenizer_of(kind), True)[values].tolist()
            )
    assert sorted(found) == sorted(sizes_of(texts))


@pytest.mark.parametrize("kind", ["byte-level bpe", "gemma"])
@pytest.mark.parametrize("packing", PACKING, ids=lambda packing: packing["packing"])
def test_labels_stand_for_the_bytes_of_their_places_in_the_stream(
    prepared, tmp_path, packing, kind
):
    _, reference = prepared(kind, **packing)
    reader = TokenReader(tmp_path / reference.path, reference.row_table, "validation")
    sizes = reader.stream.text_bytes(0, reader.stream.ends[-1])
    rows = np.arange(len(reader))
    for row, found in zip(rows.tolist(), reader.text_bytes(rows).tolist(), strict=True):
        pieces = reader.rows.pieces_of(row).tolist()
        expected = [
            size for start, count in pieces for size in sizes[start : start + count]
        ]
        expected += [0] * (17 - len(expected))
        assert found == expected[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("ranks")
def test_bits_per_byte_are_those_of_the_text(prepared, texts, tmp_path, ranks, kind):
    """In padded rows that hold a whole document, all its bytes but those of its first token."""
    settings, reference = prepared(kind, packing="padded", sequence_length=512)
    run, model = trained_run(tmp_path, reference, settings)
    measured = evaluate(run).model
    reader = TokenReader(tmp_path / reference.path, reference.row_table, "validation")
    firsts = sum(
        int(reader.stream.text_bytes(int(start), 1)[0])
        for start in reader.stream.document_offsets()[:-1]
    )
    assert measured.bytes == reference.validation.bytes - firsts
    bits = measured.loss * measured.tokens / math.log(2) / measured.bytes
    assert measured.bits_per_byte == pytest.approx(bits)
    line = ValidationSet(reader, 1000, 4).measure(LossModule(model), ranks, step=1)
    assert line.bits_per_byte == pytest.approx(measured.bits_per_byte, rel=1e-5)


def test_shares_are_whole_bytes_that_add_up():
    widths = np.array([1, 1, 1, 0, 0, 0, 5, 0])
    shares = share_bytes(widths, np.array([0, 4, 6, 8]), np.array([10, 7, 2**31 - 1]))
    assert shares.tolist() == [3, 3, 4, 0, 3, 4, 2**31 - 1, 0]


def test_damaged_bytes_of_documents_are_refused(prepared, tmp_path):
    _, reference = prepared("bert")
    file = tmp_path / reference.path / "validation.document_bytes.npy"
    sizes = np.load(file)
    np.save(file, sizes[::-1])
    reader = TokenReader(
        tmp_path / reference.path, reference.row_table, "validation", True
    )
    with pytest.raises(DataError, match=r"document_bytes\.npy"):
        reader.text_bytes(np.arange(1))


def test_a_lossless_tokenizer_needs_no_bytes_of_documents(prepared, tmp_path):
    _, reference = prepared("byte-level bpe")
    assert not list((tmp_path / reference.path).glob("*document_bytes*"))
