import logging
import os
import shutil
from pathlib import Path

import pytest

from infini_llama.configs.errors import DataError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens import units
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.storage.locks import Busy, Lock
from infini_llama.tasks.verify_data.checks import verify
from support.damage import flip

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture
def written(monkeypatch) -> list[str]:
    """Names of the units that are committed from here on."""
    names: list[str] = []
    commit = units.commit
    monkeypatch.setattr(
        units,
        "commit",
        lambda staged, target, *rest: (
            names.append(target.name),
            commit(staged, target, *rest),
        ),
    )
    return names


# A shard is a link to a file of its unit.
@pytest.mark.parametrize(
    ("damage", "again"),
    [(flip, 1), (lambda shard: os.truncate(shard, 100), 1), (Path.unlink, 0)],
)
@pytest.mark.parametrize("repair", [True, False])
def test_only_the_damaged_unit_is_made_again(
    data, tmp_path, digests, caplog, written, damage, again, repair
):
    # A second row table of the same tokens.
    preprocess(data(sequence_length=8), tmp_path)
    reference = preprocess(data(), tmp_path)
    folder, before = tmp_path / reference.path, digests(tmp_path / reference.path)
    count, written[:] = len(written), []
    damage(folder / "train/data-00001.arrow")
    with pytest.raises(DataError, match=r"data-00001\.arrow .*--repair"):
        verify(reference, tmp_path, "quick")
    if damage is flip and not repair:
        return  # its size is right, so that only a look at every checksum finds it
    with caplog.at_level(logging.WARNING, logger="infini_llama.preprocess"):
        repaired = preprocess(data(), tmp_path, repair=repair)
    assert count > 3 and len(written) == again and str(folder) in caplog.text
    assert repaired == changed(reference, built=["tokens", "row tables"])
    assert (
        preprocess(data(sequence_length=8), tmp_path).built == ("row tables",)
        and digests(folder) == before
    )
    verify(repaired, tmp_path, "deep")


def test_locks_of_a_repair_keep_other_builds_and_gc_out(
    data, built, dataset, monkeypatch
):
    home, _ = built
    others = list[bool]()
    move_aside = stage.move_aside

    def moving(path: Path) -> Path:
        for lock in (
            home / "locks" / f"dataset-{dataset.name[-12:]}.lock",
            home / "locks" / "units.lock",
        ):
            with pytest.raises(Busy), Lock(lock):
                pass
        with Lock(home / "locks" / "units.lock", shared=True):  # another preparation
            others.append(True)
        return move_aside(path)

    flip(dataset / "tokenizer.json")
    monkeypatch.setattr(stage, "move_aside", moving)
    assert preprocess(data(), home, repair=True).built == ("tokens",) and others == [
        True
    ]


def test_of_a_damaged_dataset_only_undamaged_row_tables_are_taken_over(data, tmp_path):
    reference = preprocess(data(), tmp_path)
    other = preprocess(data(sequence_length=8), tmp_path)
    tables = tmp_path / reference.path / "chunks"
    for damaged in (
        tables / other.row_table / "train.rows.npy",
        tmp_path / reference.path / "tokenizer.json",
    ):
        flip(damaged)
    assert preprocess(data(), tmp_path, repair=True) == changed(
        reference, built=["tokens"]
    )
    assert preprocess(data(sequence_length=8), tmp_path) == changed(
        other, built=["row tables"]
    )


def test_a_row_table_computed_from_damaged_lengths_is_not_taken_over(data, tmp_path):
    shard = tmp_path / preprocess(data(), tmp_path).path / "train/data-00001.arrow"
    place = shard.read_bytes().index(map_shard(shard)[0].tobytes())
    flip(shard, 8 * (place + 8))  # where the second document begins
    preprocess(data(packing="padded"), tmp_path)
    verify(preprocess(data(packing="padded"), tmp_path, repair=True), tmp_path, "deep")


def test_only_a_damaged_row_table_is_rebuilt(data, built, row_table, written):
    home, reference = built
    assert preprocess(data(), home, repair=True) == changed(reference, built=[])
    flip(row_table / "train.rows.npy")
    assert (
        preprocess(data(), home, repair=True)
        == changed(reference, built=["row tables"])
        and written == []
    )
    verify(reference, home, "deep")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "token_bytes.npy", "manifest.json", "train/state.json"]
)
def test_a_damaged_file_beside_the_shards_is_rebuilt_from_units(
    data, built, dataset, digests, name, written
):
    home, reference = built
    before = digests(dataset)
    flip(dataset / name)
    assert (
        preprocess(data(), home, repair=True) == changed(reference, built=["tokens"])
        and written == []
    )
    assert digests(dataset) == before
    verify(reference, home, "deep")
    assert read_dataset(dataset).meta.workers is None, "nothing was tokenized"


def foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").touch()


DAMAGE = {
    "a flipped bit in the table": lambda unit: flip(unit / "documents.npy"),
    "a flipped bit in the counts": lambda unit: flip(unit / "counts.npy"),
    "missing tokens": lambda unit: os.truncate(unit / "train.arrow", 100),
    "a flipped bit in the manifest": lambda unit: flip(unit / "manifest.json"),
    "no manifest": lambda unit: (unit / "manifest.json").unlink(),
    "an empty table": lambda unit: os.truncate(unit / "documents.npy", 0),
    "another folder": foreign,
}


def test_a_damaged_unit_is_not_used_for_another_dataset(
    data, built, tmp_path, digests, written
):
    """As `deduplicate` makes another dataset of the same units."""
    home, _ = built
    expected = preprocess(data(deduplicate=True), tmp_path / "elsewhere")
    for name, damage in DAMAGE.items():
        copy = shutil.copytree(home, tmp_path / name, symlinks=True)
        unit = max(
            (copy / "units").glob("*/*/train.arrow"),
            key=lambda path: path.stat().st_size,
        ).parent
        written.clear()
        damage(unit)
        assert preprocess(data(deduplicate=True), copy) == expected and written == [
            unit.name
        ], name
        assert digests(copy / expected.path) == digests(
            tmp_path / "elsewhere" / expected.path
        ), name


@pytest.mark.parametrize("deduplicate", [False, True])
def test_wrong_tokens_of_units_are_found_where_they_are_read(
    data, corpus, tmp_path, digests, dataset, written, deduplicate
):
    """By `verify` and training; by `preprocess` only where it copies them without the documents that are left out."""
    text, home = shutil.copytree(corpus, tmp_path / "text"), tmp_path / "units"
    shutil.copyfile(text / "text-001.txt", text / "text-000.txt")
    settings = data(
        files=[f"{text}/*.txt"], tokenizer={"path": str(dataset / "tokenizer.json")}
    )
    preprocess(settings, home)
    for stream in home.glob("units/*/*/*.arrow"):
        flip(stream)
    (text / "text-999.txt").write_text("an added file")
    settings, before = changed(settings, deduplicate=deduplicate), set(written)
    written.clear()
    with pytest.raises(DataError, match=r"\.arrow .*--repair"):
        verify(preprocess(settings, home), home, "deep")
    assert len(written) == 1 and not before & set(written)
    repaired, expected = (
        preprocess(settings, home, repair=True),
        preprocess(settings, tmp_path / "elsewhere"),
    )
    assert before & set(written) and digests(home / repaired.path) == digests(
        tmp_path / "elsewhere" / expected.path
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"units": 3}'])
def test_damaged_notes_on_text_only_mean_that_it_is_read_again(
    data, built, written, content
):
    home, reference = built
    for kind in ("parts", "tokenizers"):
        notes = list((home / "units" / kind).glob("*.json"))
        assert notes
        for note in notes:
            note.write_bytes(content)
        assert preprocess(data(), home) == changed(reference, built=[])
        assert (
            preprocess(data(sequence_length=8), home).digest == reference.digest
            and written == []
        )


def test_a_changed_tokenizer_of_a_recipe_is_written_again(data, tmp_path, written):
    reference = preprocess(data(), tmp_path)
    (file,) = (tmp_path / "units").glob("*/tokenizer.json")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"the", b"teh"))
    shutil.rmtree(tmp_path / reference.path)
    assert preprocess(data(), tmp_path) == reference and file.read_bytes() == content
    assert read_dataset(tmp_path / reference.path).meta.recipe == file.parent.name
