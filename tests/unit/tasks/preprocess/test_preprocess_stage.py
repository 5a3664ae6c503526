import errno
import logging
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.tasks import batches
from infini_llama.tasks.preprocess.stage import Preparation, preprocess
from infini_llama.tasks.preprocess.tokens.parts import SETTLED
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.tokenizers.tokenizer import EOS
from support.texts import documents_of, write_files


def test_a_dataset_reference_has_path_and_counts(data, corpus, tmp_path):
    planned = Preparation(data(), tmp_path).plan()
    assert Preparation(data(), tmp_path).lookup() is None
    reference = preprocess(data(), tmp_path)
    assert (
        reference.path
        == f"datasets/files-{planned.key[:12]}"
        == f"datasets/{planned.name}"
    )
    assert reference.row_table == planned.table.row_table_key[
        :12
    ] and reference.built == (
        "tokens",
        "row tables",
    )
    assert DatasetRef.model_validate(reference.to_json()) == reference
    assert Preparation(data(), tmp_path).lookup() == changed(reference, built=[])
    texts = [path.read_text(encoding="utf-8") for path in corpus.glob("*.txt")]
    splits = [reference.train, reference.validation]
    assert sum(split.documents for split in splits) == len(texts)
    assert sum(split.bytes for split in splits) == sum(
        len(text.encode()) for text in texts
    )
    assert all(split.rows == (split.tokens - 1) // 16 for split in splits)
    assert (
        reference.vocab_size == 300
        and 2 < reference.validation.unigram_entropy_bits < np.log2(300)
    )
    assert (tmp_path / "datasets" / "latest").resolve() == tmp_path / reference.path


def decoded(dataset: Path, split: str) -> list[str]:
    """The documents of a split, each of which has as many bytes as token_bytes.npy counts for its tokens."""
    tokenizer = Tokenizer.from_file(str(dataset / "tokenizer.json"))
    token_bytes = np.load(dataset / "token_bytes.npy")
    documents = [document[:-1] for document in documents_of(dataset, split)]
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents]
    assert [token_bytes[ids].sum() for ids in documents] == [
        len(text.encode()) for text in texts
    ]
    return texts


def test_decoded_documents_are_the_files_each_in_one_split(dataset, corpus):
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))]
    training, held_out = (decoded(dataset, split) for split in ("train", "validation"))
    for documents in (training, held_out):
        assert [
            text for text in texts if text in documents
        ] == documents  # in the order of their names
    assert sorted(training + held_out) == sorted(texts)


def test_an_added_file_moves_no_document_between_the_splits(data, corpus, tmp_path):
    text, home = shutil.copytree(corpus, tmp_path / "text"), tmp_path / "home"

    def splits() -> list[list[str]]:
        folder = home / preprocess(data(files=[f"{text}/*.txt"]), home).path
        return [decoded(folder, split) for split in ("train", "validation")]

    before = splits()
    for number in range(20):
        (text / f"added-{number}.txt").write_text(f"an added text, the {number}th")
        (text / f"text-{number:03d}-more.txt").write_text(
            f"between the others, the {number}th"
        )
    after = splits()
    assert sum(map(len, after)) == sum(map(len, before)) + 40
    assert all(set(old) < set(new) for old, new in zip(before, after, strict=True))
    assert not set(after[0]) & set(after[1])


@pytest.mark.parametrize("size", [1, 5000])
def test_batches_of_any_size_give_the_same_bytes_and_facts(
    data, built, tmp_path, monkeypatch, digests, size
):
    home, reference = built
    monkeypatch.setattr(batches, "BATCH_BYTES", size)
    assert preprocess(data(), tmp_path / "batches") == reference
    assert digests(tmp_path / "batches" / "datasets") == digests(home / "datasets")


def test_a_second_call_builds_nothing_and_another_length_only_rows(data, tmp_path):
    first = preprocess(data(), tmp_path)
    folder = tmp_path / first.path

    def touched() -> dict:
        return {
            str(path): path.stat().st_mtime_ns
            for path in folder.rglob("*.*")
            if "chunks" not in path.parts
        }

    before = touched()
    assert preprocess(data(), tmp_path) == changed(first, built=[])
    other = preprocess(data(sequence_length=33), tmp_path)
    assert (
        other.built == ("row tables",)
        and other.digest == first.digest
        and touched() == before
    )
    assert (
        other.sequence_length == 33
        and other.train.rows == (first.train.tokens - 1) // 33
    )
    assert len(list((folder / "chunks").iterdir())) == 2
    assert Preparation(data(), tmp_path).lookup() == changed(first, built=[])
    assert preprocess(data(tokenizer={"vocab_size": 290}), tmp_path).built == (
        "tokens",
        "row tables",
    )


def test_a_dataset_that_a_run_is_about_to_use_counts_as_used(data, tmp_path):
    folder = tmp_path / preprocess(data(), tmp_path).path
    os.utime(folder, (0, 0))
    preprocess(data(), tmp_path)
    assert time.time() - folder.stat().st_mtime < 1000, (
        "gc keeps it, also before the run is bound to it"
    )


def test_a_time_in_the_future_does_not_make_a_text_new(data, tmp_path):
    """As an archive or another machine's clock leaves it."""
    text = tmp_path / "text"
    write_files(text, (f"words of text {n} " * 40 for n in range(4)))
    os.utime(next(text.iterdir()), (2**33, 2**33))
    time.sleep(SETTLED / 1e9 + 0.1)
    first = preprocess(data(files=[str(text)]), tmp_path / "home")
    known = Preparation(data(files=[str(text)]), tmp_path / "home").lookup()
    assert known == changed(first, built=())


def test_what_another_user_has_prepared_is_used(data, tmp_path, monkeypatch):
    monkeypatch.setattr("infini_llama.tasks.preprocess.tokens.parts.SETTLED", -(10**10))
    first = preprocess(data(), tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(os, "utime", refuse)
    assert Preparation(data(), tmp_path).lookup() == changed(first, built=[]), (
        "and no text is read for it"
    )
    other = preprocess(data(deduplicate=True), tmp_path)
    assert (
        other.built == ("tokens", "row tables") and other.vocab_size == first.vocab_size
    )


def test_a_damaged_line_is_the_same_one_under_another_spelling_of_its_path(
    data, tmp_path, monkeypatch
):
    """Its words in the report have the path as it was given."""
    folder = tmp_path / "text"
    write_files(folder, (f"words of text {n} " * 40 for n in range(4)))
    (folder / "lines.jsonl").write_text('{"text": "some words"}\n{"text": \n')
    monkeypatch.setattr("infini_llama.tasks.preprocess.tokens.parts.SETTLED", -(10**10))
    monkeypatch.chdir(tmp_path)
    settings = {"on_bad_input": "skip"}
    first = preprocess(data(files=["text"], **settings), tmp_path / "home")
    other = {"tokenizer": {"vocab_size": 280}}
    again = preprocess(
        data(files=[str(folder)], **settings, **other), tmp_path / "home"
    )
    left_out = [reference.text.left_out for reference in (first, again)]
    assert [reasons.bad_records for reasons in left_out] == [1, 1]


def test_text_that_spells_the_end_of_text_token_does_not_end_a_document(data, tmp_path):
    texts = (f"{EOS} number {number} {EOS}{EOS} ends {EOS}" for number in range(30))
    reference = preprocess(
        data(files=[write_files(tmp_path, texts)]), tmp_path / "home"
    )
    for split in ("train", "validation"):
        documents = documents_of(tmp_path / "home" / reference.path, split)
        assert documents and all(ids.index(0) == len(ids) - 1 for ids in documents)


def test_an_incomplete_row_table_is_quarantined_and_rebuilt(
    data, built, row_table, caplog
):
    home, reference = built
    (row_table / "train.rows.npy").unlink()
    assert Preparation(data(), home).lookup() is None
    with caplog.at_level(logging.WARNING):
        assert preprocess(data(), home) == changed(reference, built=["row tables"])
    assert f"{reference.row_table} is incomplete; it was moved to" in caplog.text
    assert (row_table.parent / f"{row_table.name}.damaged-1" / "manifest.json").exists()


def test_a_dataset_under_the_name_of_another_is_not_used(
    built, dataset, data, tmp_path, digests
):
    home, reference = built
    other = preprocess(data(tokenizer={"vocab_size": 299}), home)
    before = digests(dataset)
    dataset.rename(tmp_path / "kept")
    shutil.copytree(home / other.path, dataset)
    assert Preparation(data(), home).lookup() is None
    assert preprocess(data(), home) == changed(
        reference, built=["tokens", "row tables"]
    )
    assert digests(dataset) == before and Preparation(
        data(tokenizer={"vocab_size": 299}), home
    ).lookup() == changed(other, built=[])


def test_a_row_table_under_the_name_of_another_is_not_used(built, row_table, data):
    home, reference = built
    other = preprocess(data(sequence_length=8), home)
    shutil.rmtree(row_table)
    row_table.with_name(other.row_table).rename(row_table)
    assert Preparation(data(), home).lookup() is None
    assert preprocess(data(), home) == changed(reference, built=["row tables"])


def test_a_foreign_hidden_file_does_not_damage_a_dataset(built, dataset, data):
    home, reference = built
    (dataset / "train" / ".DS_Store").touch()
    (dataset / "train" / ".ipynb_checkpoints").mkdir()
    (dataset / "train" / ".ipynb_checkpoints" / "x").touch()
    assert (
        Preparation(data(), home).lookup()
        == preprocess(data(), home)
        == changed(reference, built=[])
    )


def test_a_text_shorter_than_one_row_is_refused_and_leaves_nothing(data, tmp_path):
    with pytest.raises(DataError, match=r"train .*data\.sequence_length"):
        preprocess(data(sequence_length=100_000), tmp_path)
    assert not list(tmp_path.rglob(".*.tmp"))


def test_equal_documents_without_held_out_text_are_named_as_equal(data, tmp_path):
    """No fraction would help: copies of a text are on the same side."""
    files = write_files(tmp_path, ["the same text"] * 30)
    with pytest.raises(
        DataError, match=r"^30 document\(s\) with 1 different text\(s\) are too few"
    ) as caught:
        preprocess(data(files=[files]), tmp_path / "home")
    assert "fraction" not in str(caught.value).partition(";")[2]


@pytest.mark.parametrize(
    ("trained", "held_out", "purpose"),
    [("*.txt", "*.txt", "train on"), ("0.txt", "1.txt", "hold out")],
)
def test_a_lack_of_documents_beside_named_held_out_text_is_not_one_of_the_fraction(
    trained, held_out, purpose, data, tmp_path
):
    """Named held-out text counts, and no fraction of the documents."""
    write_files(tmp_path, ["every word", ""])
    named = {
        "files": [str(tmp_path / trained)],
        "validation_files": [str(tmp_path / held_out)],
    }
    with pytest.raises(DataError, match=f"no document to {purpose}") as caught:
        preprocess(data(**named), tmp_path / "home")
    assert "fraction" not in str(caught.value)


def test_a_row_as_long_as_the_text_fits_and_one_token_longer_does_not(data, tmp_path):
    tokens = preprocess(data(), tmp_path).validation.tokens
    longest = preprocess(data(sequence_length=tokens - 1), tmp_path)
    assert longest.validation.rows == 1
    folder = tmp_path / longest.path
    row = TokenReader(folder, longest.row_table, "validation").gather(np.array([0]))
    assert row.shape == (1, tokens) and row[0, -1] == 0
    with pytest.raises(DataError, match=r"data\.sequence_length"):
        preprocess(data(sequence_length=tokens), tmp_path)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="here the GPU works")
def test_a_missing_device_is_refused_before_the_work(data, tmp_path):
    with pytest.raises(PipelineError, match=r"data\.device=cuda") as caught:
        preprocess(data(device="cuda"), tmp_path)
    assert caught.value.exit_code == 64 and not list((tmp_path / "datasets").glob("*"))


def test_progress_is_reported_in_megabytes_and_ends_at_the_total(
    data, tmp_path, caplog
):
    with caplog.at_level(logging.INFO, logger="infini_llama.preprocess"):
        preprocess(data(), tmp_path)
    logged = [record for record in caplog.records if hasattr(record, "progress")]
    assert {record.getMessage() for record in logged} == {
        "reading text for the tokenizer",
        "tokenizing",
    }
    last = {record.getMessage(): record.__dict__["progress"] for record in logged}
    assert all(
        progress.unit == "MB" and progress.done == progress.total
        for progress in last.values()
    )
    assert "built tokens and row tables" in caplog.text


def test_text_that_is_all_held_out_is_named_as_such(data, corpus, tmp_path):
    with pytest.raises(DataError, match=r"all 40 training document.* held-out"):
        preprocess(
            data(
                validation_files=[str(corpus)],
                files=[str(shutil.copytree(corpus, tmp_path / "copy"))],
            ),
            tmp_path / "home",
        )
