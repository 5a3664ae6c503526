import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.shards import (
    entropy_bits,
    map_shard,
    save_array,
)
from infini_llama.tasks.preprocess.tokens.units import DOCUMENTS
from infini_llama.tasks.records.dataset import DatasetRef, VerifyReport
from infini_llama.tasks.runs.gc import Rules, collect
from infini_llama.tasks.storage.artifacts import MANIFEST, read_dataset, staging
from infini_llama.tasks.verify_data import checks
from infini_llama.tasks.verify_data.checks import verify
from support.damage import flip, reseal
from support.texts import write_files

Change = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def files_below(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def rewrite(shard: Path, change: Change) -> None:
    offsets, values = change(*(array.copy() for array in map_shard(shard)))
    batch = pa.record_batch(
        {
            "input_ids": pa.LargeListArray.from_arrays(
                pa.array(offsets), pa.array(values)
            )
        }
    )
    with shard.open("wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)


def counted(folder: Path, split: str) -> dict:
    """What the manifest states of a split, with the lengths and the entropy of its shards as they are now."""
    shards = [
        map_shard(shard) for shard in sorted((folder / split).glob("data-*.arrow"))
    ]
    lengths = np.concatenate([np.diff(offsets) for offsets, _ in shards])
    counts = np.bincount(np.concatenate([values for _, values in shards]))
    ends = {
        "shortest_document": int(lengths.min()),
        "longest_document": int(lengths.max()),
    }
    facts = json.loads((folder / MANIFEST).read_bytes())["content"][split]
    return facts | ends | {"unigram_entropy_bits": entropy_bits(counts)}


@pytest.mark.parametrize("level", ["quick", "deep"])
def test_a_good_dataset_passes_with_a_report(built, dataset, level, caplog):
    home, reference = built
    with caplog.at_level(logging.INFO, logger="infini_llama.verify"):
        report = verify(reference, home, level, full_below=10**9)
    assert VerifyReport.model_validate(report.to_json()) == report
    assert (report.level, report.verify_on_read) == (level, False)
    names = [check.name for check in report.checks]
    assert names[:5] == [
        "manifest of the tokens",
        "manifest of the rows",
        "token files",
        "row files",
        "tokenizer",
    ]
    assert names[5:] == (
        ["tokens", "rows", "leakage", "text"] if level == "deep" else []
    )
    assert all(check.detail for check in report.checks)
    files = [path for path in files_below(dataset) if path.name != MANIFEST]
    assert report.files == len(files) and report.checked_bytes == sum(
        path.stat().st_size for path in files
    )
    progress = [
        record.__dict__["progress"]
        for record in caplog.records
        if hasattr(record, "progress")
    ]
    assert progress[-1].done == progress[-1].total == len(names)


def test_every_shard_is_checked_whatever_the_threads(
    built, dataset, caplog, monkeypatch
):
    home, reference = built
    for threads, at_once in ((16, 2_000_000), (1, 100)):
        monkeypatch.setattr(checks, "MOST_THREADS", threads)
        monkeypatch.setattr(
            "infini_llama.tasks.preprocess.tokens.shards.COUNTED", at_once
        )
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="infini_llama.verify"):
            verify(reference, home, "deep")
        for split in ("train", "validation"):
            shards = list((dataset / split).glob("*.arrow"))
            reported = [
                record.progress
                for record in caplog.records
                if f"the tokens of {split}" in record.getMessage()
            ]
            assert [each.done for each in reported] == list(
                range(1, len(shards) + 1)
            ) and len(shards) > 1


def test_facts_of_the_manifest_that_the_tokens_deny_are_found_by_deep(built, dataset):
    home, reference = built
    content = json.loads((dataset / MANIFEST).read_bytes())["content"]
    for name in (
        "tokens",
        "unigram_entropy_bits",
        "shortest_document",
        "longest_document",
    ):
        resealed = changed(
            reference, digest=reseal(dataset, train=content["train"] | {name: 1000})
        )
        with pytest.raises(DataError, match=f"{dataset}/train .*1,?000"):
            verify(resealed, home, "deep")


def test_one_flipped_bit_in_any_file_is_found_and_the_file_named(built, dataset):
    home, reference = built
    struck = 0
    for level, full_below in (("quick", 10**9), ("deep", 0)):
        for path in files_below(dataset):
            whole = path.read_bytes()
            for bit in (0, 4 * len(whole), 8 * len(whole) - 1):
                flip(path, bit)
                with pytest.raises(DataError, match=str(path)) as caught:
                    verify(reference, home, level, full_below)
                assert caught.value.exit_code == 65
                path.write_bytes(whole)
                struck += 1
    assert struck >= 60
    verify(reference, home, "deep")


def test_quick_above_the_bound_leaves_only_the_bytes_of_shards_unread(built, dataset):
    home, reference = built
    report = verify(reference, home, "quick", full_below=10)
    assert report.verify_on_read and report.checked_bytes == 0
    shard = next((dataset / "train").glob("*.arrow"))
    flip(shard, 8 * 900)
    assert verify(reference, home, "quick", full_below=10).verify_on_read
    for path in (
        dataset / "tokenizer.json",
        dataset / "token_bytes.npy",
        dataset / MANIFEST,
    ):
        whole = path.read_bytes()
        flip(path, 8 * (len(whole) - 2))
        with pytest.raises(DataError, match=str(path)):
            verify(reference, home, "quick", full_below=10)
        path.write_bytes(whole)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match=str(shard)):
        verify(reference, home, "quick", full_below=10)


def test_what_no_checksum_shows_is_rebuilt_as_the_message_says(built, dataset, data):
    home, reference = built
    rewrite(dataset / "train" / "data-00000.arrow", token(1, 300))
    resealed = changed(reference, digest=reseal(dataset))
    with pytest.raises(DataError) as caught:
        verify(resealed, home, "deep")
    recipe = home / "units" / read_dataset(dataset).meta.recipe
    assert f"--repair rebuilds none: remove {dataset} and {recipe}, " in str(
        caught.value
    )
    assert preprocess(data(), home, repair=True).built == ()
    assert recipe.is_dir() and recipe.parent == home / "units"
    shutil.rmtree(dataset)
    shutil.rmtree(recipe)
    verify(preprocess(data(), home), home, "deep")


def test_a_dataset_under_the_name_of_another_is_refused(built, dataset, data):
    home, reference = built
    other = preprocess(data(tokenizer={"vocab_size": 299}), home)
    shutil.rmtree(dataset)
    (home / other.path).rename(dataset)
    with pytest.raises(DataError, match="key"):
        verify(changed(other, path=reference.path), home, "quick")


def test_a_row_table_under_the_name_of_another_is_refused(built, row_table, data):
    home, reference = built
    other = preprocess(data(sequence_length=8), home)
    shutil.rmtree(row_table)
    row_table.with_name(other.row_table).rename(row_table)
    with pytest.raises(DataError, match="key"):
        verify(changed(other, row_table=reference.row_table), home, "quick")


def test_a_renamed_dataset_is_valid(built, dataset):
    home, reference = built
    dataset.rename(home / "datasets" / "my-corpus")
    verify(changed(reference, path="datasets/my-corpus"), home, "quick")


def test_another_dataset_than_the_reference_says_is_refused(built):
    home, reference = built
    for name in ("digest", "row_table_digest"):
        with pytest.raises(DataError, match=r"blake3:[0-9a-f]{64}.*blake3:0"):
            verify(changed(reference, **{name: "blake3:0"}), home, "quick", 0)


def test_a_missing_dataset_is_reported(built, tmp_path):
    with pytest.raises(DataError, match="manifest"):
        verify(built[1], tmp_path / "nowhere", "quick", 0)


def token(place: int, value: int) -> Change:
    def change(
        offsets: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        values[place] = value
        return offsets, values

    return change


NO_END, NO_ASCENT = (
    "do not end with the one end-of-text token",
    "document offsets that do not ascend",
)
COUNTS = r"has \{'documents': .*; the manifest says"
WRONG = [
    (token(1, 300), "has token 300, beyond the vocabulary of 300"),
    (token(1, 0), NO_END),
    (token(-1, 5), NO_END),
    (
        lambda offsets, values: (offsets, values.astype(np.uint32)),
        "holds uint32; the manifest says uint16",
    ),
    (
        lambda offsets, values: (np.append(offsets[:-1], offsets[-1] - 1), values),
        COUNTS,
    ),
    (
        lambda offsets, values: (
            np.concatenate((offsets[:2], offsets[1:2], offsets[3:])),
            values,
        ),
        NO_ASCENT,
    ),
    (lambda offsets, values: (np.concatenate(([1], offsets[1:])), values), COUNTS),
    (lambda offsets, values: (np.delete(offsets, 1), values), COUNTS),
    (
        lambda offsets, values: (
            np.append(offsets[:-1], offsets[-1] + 1),
            np.append(values, values[-1:]),
        ),
        COUNTS,
    ),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_a_shard_that_is_whole_but_wrong_is_found_by_deep(
    built, dataset, change, sentence
):
    home, reference = built
    shard = dataset / "train" / "data-00000.arrow"
    rewrite(shard, change)
    resealed = changed(reference, digest=reseal(dataset))
    verify(resealed, home, "quick")
    with pytest.raises(DataError, match=f"{shard} .*{sentence}"):
        verify(resealed, home, "deep")


def test_a_row_table_of_other_tokens_is_found_by_deep(built, row_table):
    home, reference = built
    starts = np.load(row_table / "train.rows.npy")
    for wrong in (
        starts + 1,
        starts[::-1],
        starts[:-1],
        starts.astype(np.int32),
        np.append(starts, starts[-1] + 16),
    ):
        save_array(row_table / "train.rows.npy", wrong)
        resealed = changed(reference, row_table_digest=reseal(row_table))
        verify(resealed, home, "quick")
        with pytest.raises(DataError, match=r"train\.rows\.npy"):
            verify(resealed, home, "deep")
    save_array(row_table / "train.rows.npy", starts)
    digest = reseal(row_table, rows={"train": len(starts) + 1, "validation": 3})
    with pytest.raises(DataError, match="manifest"):
        verify(changed(reference, row_table_digest=digest), home, "deep")


def test_a_different_tokenizer_is_found(built, dataset):
    home, reference = built
    description = json.loads((dataset / "tokenizer.json").read_bytes())
    vocabulary = description["model"]["vocab"]
    first, second = "c", "cat" if "cat" in vocabulary else max(vocabulary, key=len)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (dataset / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    assert Tokenizer.from_file(str(dataset / "tokenizer.json")).get_vocab_size() == 300
    with pytest.raises(DataError, match=r"token_bytes\.npy"):
        verify(changed(reference, digest=reseal(dataset)), home, "quick")


def test_tokens_that_the_tokenizer_would_not_give_are_found_by_deep(built, dataset):
    home, reference = built

    tokenizer = json.loads((dataset / "tokenizer.json").read_bytes())["model"]
    left, right = (tokenizer["vocab"][piece] for piece in tokenizer["merges"][0])

    def unmerge(
        offsets: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        pieces = np.where(np.arange(len(values)) % 2, right, left)
        return offsets, np.where(values == 0, 0, pieces).astype(np.uint16)

    for shard in (dataset / "train").glob("*.arrow"):
        rewrite(shard, unmerge)
    with pytest.raises(DataError, match=r"the tokens of train .* bytes of text"):
        verify(
            changed(reference, digest=reseal(dataset, train=counted(dataset, "train"))),
            home,
            "deep",
        )


def test_a_document_in_both_splits_is_found_by_deep(built, dataset, row_table):
    home, reference = built
    offsets, values = map_shard(dataset / "train" / "data-00000.arrow")
    leaked = values[: offsets[1]]
    shard = dataset / "validation" / "data-00000.arrow"
    extra = len(leaked)

    def prepend(
        offsets: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate(([0], offsets + extra)), np.concatenate((leaked, values))

    rewrite(shard, prepend)
    facts = counted(dataset, "validation")
    for number, entry in enumerate(facts["shards"]):
        added = (
            {"documents": 1, "tokens": extra}
            if number == 0
            else {"first_document": 1, "first_token": extra}
        )
        entry |= {name: entry[name] + by for name, by in added.items()}
    facts |= {"documents": facts["documents"] + 1, "tokens": facts["tokens"] + extra}
    rows = np.arange((facts["tokens"] - 1) // 16, dtype=np.int64) * 16
    save_array(row_table / "validation.rows.npy", rows)
    counts = {"train": reference.train.rows, "validation": len(rows)}
    digests = {
        "digest": reseal(dataset, validation=facts),
        "row_table_digest": reseal(row_table, rows=counts),
    }
    with pytest.raises(DataError, match=r"^1 training document"):
        verify(changed(reference, **digests), home, "deep")


def test_an_end_of_text_token_that_text_could_hold_is_no_text(data, dataset, tmp_path):
    tokenizer = {"path": str(dataset / "tokenizer.json"), "eos": "Q"}
    verify(preprocess(data(tokenizer=tokenizer), tmp_path), tmp_path, "deep")


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_special_token_that_text_spells_stands_for_its_bytes(data, tmp_path, kind):
    """The unknown token of a WordPiece tokenizer is the end of text, too."""
    texts = (f"words <|endoftext|> and {number} more " * 40 for number in range(40))
    write_files(tmp_path / "text", texts)
    tokenizer = {"kind": kind, "vocab_size": 300, "split_special_tokens": False}
    settings = data(files=[str(tmp_path / "text")], tokenizer=tokenizer)
    verify(preprocess(settings, tmp_path / "home"), tmp_path / "home", "deep")


@pytest.mark.parametrize("damage", ["empty", "flipped", "missing"])
def test_a_damaged_table_of_a_unit_does_not_accuse_the_dataset(built, damage):
    home, reference = built
    for table in home.glob(f"units/*/*/{DOCUMENTS}"):
        whole = table.read_bytes()
        table.unlink()
        if damage == "empty":
            table.touch()
        elif damage == "flipped":
            table.write_bytes(whole[:128] + bytes(255 - byte for byte in whole[128:]))
    assert "are not compared" in detail_of_text(reference, home)


def detail_of_text(reference: DatasetRef, home: Path) -> str:
    (found,) = (
        check.detail
        for check in verify(reference, home, "deep").checks
        if check.name == "text"
    )
    return found


def test_a_unit_that_is_being_written_is_not_compared_with(built):
    home, reference = built
    unit = next((home / "units").glob("*/*/documents.npy")).parent
    half = staging(unit)
    (half / "documents.npy").write_bytes(b"half")
    assert "with the hashes of the text that was read" in detail_of_text(
        reference, home
    )


def test_documents_of_deleted_units_are_not_compared(
    data, corpus, tmp_path, small_parts
):
    """`gc` deletes a unit of which the dataset has a copy without some documents."""
    text, home = shutil.copytree(corpus, tmp_path / "text"), tmp_path / "home"
    shutil.copyfile(text / "text-001.txt", text / "text-000.txt")
    reference = preprocess(data(files=[f"{text}/*.txt"], deduplicate=True), home)
    count = len(list((home / "units").glob("*/*/documents.npy")))
    collect(home, Rules(older_than=0.0), yes=True)
    assert 0 < len(list((home / "units").glob("*/*/documents.npy"))) < count
    assert "not those of" in detail_of_text(reference, home)
