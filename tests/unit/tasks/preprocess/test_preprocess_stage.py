import logging
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.stage import Preparation, lookup, preprocess
from infini_llama.tasks.preprocess.tokenizers.tokenizer import EOS
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.records.dataset import DatasetRef


def temporaries(home: Path) -> list[str]:
    return [str(path) for path in home.rglob(".*.tmp")]


def test_a_dataset_reference_has_path_and_counts(data, corpus, tmp_path):
    planned = Preparation(data(), tmp_path).plan()
    assert lookup(data(), tmp_path) is None
    reference = preprocess(data(), tmp_path)
    assert reference.path == f"datasets/files-{planned.key[:12]}" == f"datasets/{planned.name}"
    assert reference.chunks == planned.chunks_key[:12] and reference.built == ("tokens", "chunks")
    assert DatasetRef.from_json(reference.to_json()) == reference
    assert lookup(data(), tmp_path) == changed(reference, built=[])
    texts = [path.read_text(encoding="utf-8") for path in corpus.glob("*.txt")]
    splits = [reference.train, reference.validation]
    assert sum(split.documents for split in splits) == len(texts)
    assert sum(split.bytes for split in splits) == sum(len(text.encode()) for text in texts)
    assert all(split.rows == (split.tokens - 1) // 16 for split in splits)
    assert reference.vocab_size == 300 and 2 < reference.validation.unigram_entropy_bits < np.log2(300)
    assert (tmp_path / "datasets" / "latest").resolve() == tmp_path / reference.path


def test_decoded_documents_are_the_files_each_in_one_split(data, corpus, tmp_path):
    reference = preprocess(data(), tmp_path)
    folder = tmp_path / reference.path
    tokenizer, lengths = Tokenizer.from_file(str(folder / "tokenizer.json")), np.load(folder / "token_bytes.npy")
    read = []
    for split in ("train", "validation"):
        found = []
        for shard in sorted((folder / split).glob("*.arrow")):
            offsets, values = map_shard(shard)
            for start, end in pairwise(offsets):
                assert values[end - 1] == 0 and lengths[values[start:end]].sum() > 0
                found.append(tokenizer.decode(values[start : end - 1].tolist(), skip_special_tokens=False))
                assert lengths[values[start:end]].sum() == len(found[-1].encode())
        read += [found]
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))]
    assert [text for text in texts if text in read[0]] == read[0]  # in the order of their names
    assert [text for text in texts if text in read[1]] == read[1]
    assert sorted(read[0] + read[1]) == sorted(texts)


def test_a_rebuild_elsewhere_gives_the_same_bytes(data, corpus, tmp_path, digests):
    shutil.copytree(corpus, tmp_path / "moved")
    first = preprocess(data(), tmp_path / "one")
    second = preprocess(data(files=[str(tmp_path / "moved" / "*.txt")]), tmp_path / "two")
    assert first == second
    assert digests(tmp_path / "one" / "datasets") == digests(tmp_path / "two" / "datasets")


def test_an_added_file_moves_no_other_document_between_the_splits(data, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "text")
    settings = data(files=[str(tmp_path / "text" / "*.txt")])

    def splits() -> tuple[set[bytes], set[bytes], int]:
        """The texts of both splits, and how many documents there are."""
        reference = preprocess(settings, tmp_path / "home")
        folder = tmp_path / "home" / reference.path
        tokenizer, found = Tokenizer.from_file(str(folder / "tokenizer.json")), []
        for split in ("train", "validation"):
            mapped = [map_shard(shard) for shard in (folder / split).glob("*.arrow")]
            found.append(
                {
                    tokenizer.decode(values[start : end - 1].tolist(), skip_special_tokens=False).encode()
                    for offsets, values in mapped
                    for start, end in pairwise(offsets)
                }
            )
        return found[0], found[1], reference.train.documents + reference.validation.documents

    training, held_out, count = splits()
    for number in range(20):
        (tmp_path / "text" / f"added-{number}.txt").write_text(f"an added text, the {number}th")
        (tmp_path / "text" / f"text-{number:03d}-more.txt").write_text(f"between the others, the {number}th")
    more_training, more_held_out, more = splits()
    assert more == count + 40
    assert training < more_training and held_out < more_held_out and not more_training & more_held_out


@pytest.mark.parametrize("size", [1, 5000])
def test_in_however_many_batches_the_text_is_tokenized_the_bytes_and_facts_are_the_same(
    data, built, tmp_path, monkeypatch, digests, size
):
    home, reference = built
    monkeypatch.setattr(texts, "BATCH_BYTES", size)
    assert preprocess(data(), tmp_path / "batches") == reference
    assert digests(tmp_path / "batches" / "datasets") == digests(home / "datasets")


def test_a_second_call_builds_nothing_and_another_length_only_rows(data, tmp_path):
    first = preprocess(data(), tmp_path)
    folder = tmp_path / first.path

    def touched() -> dict:
        return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*.*") if "chunks" not in path.parts}

    before = touched()
    assert preprocess(data(), tmp_path) == changed(first, built=[])
    other = preprocess(data(sequence_length=33), tmp_path)
    assert other.built == ("chunks",) and other.digest == first.digest and touched() == before
    assert other.sequence_length == 33 and other.train.rows == (first.train.tokens - 1) // 33
    assert len(list((folder / "chunks").iterdir())) == 2
    assert lookup(data(), tmp_path) == changed(first, built=[])
    assert preprocess(data(tokenizer={"vocab_size": 290}), tmp_path).built == ("tokens", "chunks")


def test_text_that_spells_the_end_of_text_token_does_not_end_a_document(data, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{EOS} number {number} {EOS}{EOS} ends {EOS}")
    reference = preprocess(data(files=[str(tmp_path / "text/*.txt")]), tmp_path)
    for shard in (tmp_path / reference.path).rglob("*.arrow"):
        offsets, values = map_shard(shard)
        assert np.flatnonzero(values == 0).tolist() == (offsets[1:] - 1).tolist()


def test_an_incomplete_row_table_is_quarantined_and_rebuilt(data, built, caplog):
    home, reference = built
    table = home / reference.path / "chunks" / reference.chunks
    (table / "train.rows.npy").unlink()
    assert lookup(data(), home) is None
    with caplog.at_level(logging.WARNING):
        assert preprocess(data(), home) == changed(reference, built=["chunks"])
    assert f"{reference.chunks} is incomplete; it was moved to" in caplog.text
    assert (table.parent / f"{table.name}.damaged-1" / "manifest.json").exists()


def test_a_dataset_under_the_name_of_another_is_not_used(built, data, tmp_path, digests):
    home, reference = built
    other = preprocess(data(tokenizer={"vocab_size": 299}), home)
    one, two = home / reference.path, home / other.path
    before = digests(one)
    one.rename(tmp_path / "kept")
    shutil.copytree(two, one)
    assert lookup(data(), home) is None
    assert preprocess(data(), home) == changed(reference, built=["tokens", "chunks"])
    assert digests(one) == before and lookup(data(tokenizer={"vocab_size": 299}), home) == changed(other, built=[])


def test_a_row_table_under_the_name_of_another_is_not_used(built, data):
    home, reference = built
    other = preprocess(data(sequence_length=8), home)
    chunks = home / reference.path / "chunks"
    shutil.rmtree(chunks / reference.chunks)
    (chunks / other.chunks).rename(chunks / reference.chunks)
    assert lookup(data(), home) is None
    assert preprocess(data(), home) == changed(reference, built=["chunks"])


def test_a_foreign_hidden_file_does_not_damage_a_dataset(built, data):
    home, reference = built
    (home / reference.path / "train" / ".DS_Store").touch()
    (home / reference.path / "train" / ".ipynb_checkpoints").mkdir()
    (home / reference.path / "train" / ".ipynb_checkpoints" / "x").touch()
    assert lookup(data(), home) == preprocess(data(), home) == changed(reference, built=[])


def test_a_text_shorter_than_one_row_is_refused_and_leaves_nothing(data, tmp_path):
    with pytest.raises(DataError, match=r"train .*data\.sequence_length"):
        preprocess(data(sequence_length=100_000), tmp_path)
    assert temporaries(tmp_path) == []


def test_a_row_as_long_as_the_text_fits_and_one_token_longer_does_not(data, tmp_path):
    tokens = preprocess(data(), tmp_path).validation.tokens
    longest = preprocess(data(sequence_length=tokens - 1), tmp_path)
    assert longest.validation.rows == 1
    folder = tmp_path / longest.path
    row = TokenReader(folder, longest.chunks, "validation").gather(np.array([0]))
    assert row.shape == (1, tokens) and row[0, -1] == 0
    with pytest.raises(DataError, match=r"data\.sequence_length"):
        preprocess(data(sequence_length=tokens), tmp_path)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="here the GPU works")
def test_a_missing_device_is_refused_before_the_work(data, tmp_path):
    with pytest.raises(PipelineError, match=r"data\.device=cuda") as caught:
        preprocess(data(device="cuda"), tmp_path)
    assert caught.value.exit_code == 64 and not list((tmp_path / "datasets").glob("*"))


def test_progress_is_reported_in_megabytes_and_ends_at_the_total(data, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="infini_llama.preprocess"):
        preprocess(data(), tmp_path)
    logged = [record for record in caplog.records if hasattr(record, "progress")]
    assert {record.getMessage() for record in logged} == {"reading text for the tokenizer", "tokenizing"}
    last = {record.getMessage(): record.__dict__["progress"] for record in logged}
    assert all(progress.unit == "MB" and progress.done == progress.total for progress in last.values())
    assert "built tokens and chunks" in caplog.text
