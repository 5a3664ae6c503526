"""The `datasets` library: it opens what `preprocess` writes, and `preprocess` reads what it writes."""

import re
import struct

import datasets
import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources import formats, huggingface
from infini_llama.tasks.preprocess.sources.texts import Unreadable
from infini_llama.tasks.storage.artifacts import check
from support.stages import survey
from support.texts import documents_of

TEXTS = [
    "first",
    "",
    'with "quotes", commas\nand lines',
    "größer 日本語 🙂",
    "[brackets], {braces}",
    "last\n",
]
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5e' * 32}\nsize 9\n"


def test_hugging_face_folders_are_read_saved_or_as_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_dict({"id": list(range(6)), "body": TEXTS})
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(
        str(tmp_path / "several")
    )
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "README.md").write_text("A card, which is not the data.")
    table.to_parquet(str(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet"))
    for folder in ("saved", "several", "hub"):
        given = {
            "source": "huggingface",
            "dataset": str(tmp_path / folder),
            "text_column": "body",
        }
        assert survey(DataConfig.model_validate(given)).documents == sorted(
            text for text in TEXTS if text
        ), folder
    given = {
        "source": "huggingface",
        "dataset": str(tmp_path / "several"),
        "text_column": "body",
        "validation_split": "test",
    }
    corpus = survey(DataConfig.model_validate(given))
    assert corpus.validation == ["first"] and "first" not in corpus.train
    assert survey(
        DataConfig(files=[str(tmp_path / "saved")], text_column="body")
    ).documents == sorted(filter(None, TEXTS))
    with pytest.raises(DataError, match=r"text.*'id', 'body'"):
        survey(DataConfig.model_validate(given | {"text_column": "text"}))
    with pytest.raises(DataError, match="nothing"):
        survey(DataConfig.model_validate(given | {"dataset_split": "nothing"}))
    with pytest.raises(ConfigError, match=r"data\.revision=v1\.0 .*remove it"):
        survey(DataConfig.model_validate(given | {"revision": "v1.0"}))
    for folder in ("saved", "several"):
        with pytest.raises(
            ConfigError, match=rf"data\.dataset_config=english .*{folder} .*remove it"
        ):
            survey(
                DataConfig.model_validate(
                    given
                    | {"dataset": str(tmp_path / folder), "dataset_config": "english"}
                )
            )
    datasets.Dataset.from_dict({"body": TEXTS}, split="test").save_to_disk(
        str(tmp_path / "test")
    )
    for folder, split in (
        ("saved", "train[:50%]"),
        ("saved", "test"),
        ("several", "train[:50%]"),
        ("test", "dev"),
    ):
        with pytest.raises(
            DataError, match=rf"{folder} .*split '{re.escape(split)}' \(it has "
        ):
            other = {
                "dataset": str(tmp_path / folder),
                "dataset_split": split,
                "validation_split": None,
            }
            survey(DataConfig.model_validate(given | other))
    with pytest.raises(Unreadable):
        list(
            formats.read(
                tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", "text"
            )
        )
    (tmp_path / "hub" / "data" / "train-00000-of-00001.parquet").write_text(LFS)
    other = {"dataset": str(tmp_path / "hub"), "validation_split": None}
    with pytest.raises(DataError, match=r"00001\.parquet .*git lfs pull"):
        survey(DataConfig.model_validate(given | other | {"on_bad_input": "skip"}))


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A dataset with two splits, in which `test` was not downloaded."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "clone"
    (folder / "data").mkdir(parents=True)
    table = datasets.Dataset.from_dict({"text": TEXTS})
    table.to_parquet(str(folder / "data" / "train-00000.parquet"))
    (folder / "data" / "test-00000.parquet").write_text(LFS)
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_a_pointer_in_a_split_that_is_not_read_is_not_refused(clone, streaming):
    data = DataConfig(source="huggingface", dataset=str(clone), streaming=streaming)
    assert survey(data).documents == sorted(filter(None, TEXTS))


@pytest.mark.parametrize(
    "splits",
    [
        {"dataset_split": "test"},
        {"validation_split": "test"},
        {"dataset_split": "train+test"},
        {"dataset_split": "train[:2]"},  # `datasets` prepares all splits
    ],
)
def test_a_pointer_in_a_split_that_is_read_is_refused(clone, splits):
    data = DataConfig(source="huggingface", dataset=str(clone), **splits)
    with pytest.raises(DataError, match=r"test-00000\.parquet is a Git LFS pointer"):
        survey(data)


@pytest.mark.parametrize("name", ["README.md", "dataset_infos.json"])
def test_a_pointer_in_place_of_the_description_of_the_splits_is_refused(clone, name):
    (clone / name).write_text(LFS)
    data = DataConfig(source="huggingface", dataset=str(clone))
    with pytest.raises(DataError, match=rf"{name} is a Git LFS pointer"):
        survey(data)


def test_a_link_into_an_annex_without_its_file_is_refused(clone):
    """`datasets` would omit it, and read a part of the split."""
    link = clone / "data" / "train-00001.parquet"
    link.symlink_to("../.git/annex/objects/xK/9p/KEY/KEY")
    data = DataConfig(source="huggingface", dataset=str(clone))
    with pytest.raises(DataError, match=r"train-00001\.parquet is a git-annex pointer"):
        survey(data)


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_a_folder_that_are_of_no_split_are_counted(
    tmp_path, monkeypatch, streaming
):
    """`datasets` reads the format that most files have, and where a name says train, files of such names."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = {
        "a.csv": "text\nin a table\n",
        "b.jsonl": '{"text": "b"}\n',
        "sub/b.jsonl": '{"text": "c"}\n',
        ".git/x.txt": "x",
    }
    names = {
        "train.jsonl": '{"text": "b"}\n',
        "test.jsonl": '{"text": "c"}\n',
        "more.jsonl": '{"text": "d"}\n',
    }
    held_out = {"validation_split": "test"}
    for folder, files, splits, documents, others in (
        ("mixed", texts, {}, ["b", "c"], {".csv": 1}),
        ("named", names, {}, ["b"], {".jsonl": 2}),
        ("named", names, held_out, ["b", "c"], {".jsonl": 1}),
        ("whole", {"b.jsonl": '{"text": "b"}\n'}, {}, ["b"], {}),
    ):
        for name, content in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(content)
        given = {
            "source": "huggingface",
            "dataset": str(tmp_path / folder),
            "streaming": streaming,
        }
        corpus = survey(DataConfig.model_validate(given | splits))
        assert (corpus.documents, corpus.report.other_files) == (documents, others)


def test_shards_of_an_earlier_save_are_no_text(tmp_path):
    datasets.Dataset.from_dict(
        {"text": ["an earlier text", "another", "a third"]}
    ).save_to_disk(tmp_path, num_shards=3)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path, num_shards=2)
    assert len([*tmp_path.glob("data-*.arrow")]) == 5
    assert survey(DataConfig(files=[str(tmp_path)])).documents == sorted(
        filter(None, TEXTS)
    )


def test_a_saved_folder_with_a_damaged_offset_is_named(tmp_path):
    """The offset leads past the end of the texts, into memory that is not theirs."""
    datasets.Dataset.from_dict({"text": ["good", "text"]}).save_to_disk(tmp_path)
    (shard,) = tmp_path.glob("data-*.arrow")
    shard.write_bytes(
        shard.read_bytes().replace(
            struct.pack("<3i", 0, 4, 8), struct.pack("<3i", 0, 20, 8)
        )
    )
    with pytest.raises(DataError, match=rf"{tmp_path} .*Offset invariant failure"):
        survey(DataConfig(source="huggingface", dataset=str(tmp_path)))


def test_the_datasets_library_opens_and_maps_both_splits(built, dataset):
    _, reference = built
    fingerprints = set()
    for split in ("train", "validation"):
        opened = datasets.load_from_disk(str(dataset / split))
        assert isinstance(opened, datasets.Dataset)
        assert opened.features == {
            "input_ids": datasets.LargeList(datasets.Value("uint16"))
        }
        stats = getattr(reference, split)
        assert len(opened) == stats.documents
        assert list(opened["input_ids"]) == documents_of(dataset, split)
        assert all(ids[-1] == 0 and 0 not in ids[:-1] for ids in opened["input_ids"])
        mapped = opened.map(lambda row: {"length": len(row["input_ids"])})
        assert sum(list(mapped["length"])) == stats.tokens
        fingerprints.add(opened._fingerprint)
    assert len(fingerprints) == 2  # `datasets` names its caches by them
    assert list(dataset.rglob("cache-*.arrow"))
    check(dataset, "dataset", checksums=True)


@pytest.mark.parametrize("dataset", ["{}/train.jsonl", "{}/nothing", "./nothing"])
def test_a_path_that_is_no_folder_is_no_name_of_the_hub(tmp_path, monkeypatch, dataset):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr(huggingface, "revision_of", None)  # the Hub is not asked
    with pytest.raises(DataError, match=r"data\.dataset="):
        survey(DataConfig(source="huggingface", dataset=dataset.format(tmp_path)))
