"""Files of a Hugging Face dataset: the same documents as by `source: files`, streamed or not."""

from pathlib import Path

import datasets
import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.text_formats import RECORD_ENDINGS
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.storage.artifacts import read_dataset
from support.dataset_hub import COMMIT, DATASET, Hub
from support.stages import finish_build, start_build, survey
from support.texts import compressed, encoded

TEXTS = [
    "a plain text",
    "null",
    "NA",
    "None",
    "nan",
    "N/A",
    "",
    'he said "no", twice',
    "größer 日本語 🙂",
    "1.50",
    "true",
    "2026-01-02",
    " spaces around ",
]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path) -> None:
    """The texts in the format that the name says, with a byte order mark where it is one of text."""
    form = path.name.split(".")[1].lower()
    mark = b"" if form in ("json", "parquet", "arrow") else b"\xef\xbb\xbf"
    path.parent.mkdir(parents=True, exist_ok=True)
    compressed(mark + encoded(form, TEXTS), path.parent, path.name)


def of_hub(folder: Path, **given: object) -> DataConfig:
    return DataConfig.model_validate(
        {"source": "huggingface", "dataset": str(folder)} | given
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        *RECORD_ENDINGS,
        "jsonl.gz",
    ],
)
def test_a_folder_has_the_same_documents_and_bytes_by_either_source(
    tmp_path, form, streaming
):
    folder = tmp_path / "folder"
    write(folder / f"a.{form}")
    write(folder / "deeper" / f"b.{form}")
    settings = {
        "validation_fraction": 0.5,
        "sequence_length": 4,
        "tokenizer": {"vocab_size": 270},
    }
    files = DataConfig.model_validate({"files": [str(folder)], **settings})
    hub = of_hub(folder, streaming=streaming, **settings)
    seen = survey(hub)
    assert seen == survey(files)
    assert seen.documents == sorted(filter(None, TEXTS * 2))
    assert (
        preprocess(hub, tmp_path / "1").digest
        == preprocess(files, tmp_path / "2").digest
    )
    assert not list((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,text\n1,one\n2\n"),
        ("a.jsonl", '{"text": "a"}\n{"other": "b"}\n'),
        ("a.tsv", 'id\ttext\n1\t"one\n2\tb"c"\n'),
        ("a.parquet", "PAR1 and no more"),
    ],
)
def test_what_is_damaged_is_refused_in_the_same_words(
    tmp_path, name, content, streaming
):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_text(content, encoding="utf-8")
    messages = []
    for data in (DataConfig(files=[str(folder)]), of_hub(folder, streaming=streaming)):
        try:
            messages.append(str(survey(data).documents))
        except DataError as error:
            messages.append(str(error).replace("data.dataset", "data.files"))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("streaming", [False, True])
def test_endings_in_capitals_which_datasets_does_not_find_are_refused(
    tmp_path, streaming
):
    """By `source: files` they are read."""
    write(tmp_path / "folder" / "A.CSV")
    assert survey(DataConfig(files=[str(tmp_path / "folder")])).documents
    with pytest.raises(
        DataError, match=r"data\.dataset: .*No \(supported\) data files found"
    ):
        survey(of_hub(tmp_path / "folder", streaming=streaming))


@pytest.mark.parametrize("key", ["dataset_split", "validation_split"])
def test_an_unknown_split_names_the_file_that_decided_it(tmp_path, key):
    write(tmp_path / "folder" / "stories.jsonl")
    write(tmp_path / "folder" / "dev-diary.jsonl")
    splits = {"dataset_split": "validation", key: "train"}
    with pytest.raises(
        DataError, match=rf"data\.{key}: .* no split 'train'.*dev-diary\.jsonl"
    ):
        survey(of_hub(tmp_path / "folder", **splits))


def test_a_card_with_options_of_reading_is_left_to_datasets(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.csv").write_text("id;text\n1;one, two\n2;three\n")
    card = "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n{}---\n"
    (folder / "README.md").write_text(card.format('  sep: ";"\n'))
    assert survey(of_hub(folder)).documents == ["one, two", "three"]
    (folder / "README.md").write_text(card.format(""))
    with pytest.raises(DataError, match=r"a\.csv"):
        survey(of_hub(folder))


def test_splits_that_are_expressions_and_lines_of_text_are_left_to_datasets(tmp_path):
    write(tmp_path / "folder" / "a.jsonl")
    kept = survey(of_hub(tmp_path / "folder", dataset_split="train[:2]"))
    assert kept.documents == ["a plain text", "null"]
    streamed = of_hub(tmp_path / "folder", dataset_split="train[:2]", streaming=True)
    with pytest.raises(ConfigError, match=r"dataset_split=train\[:2\].*streaming"):
        survey(streamed)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.txt").write_text("one\ntwo\n")
    assert survey(of_hub(tmp_path / "lines")).documents == ["one", "two"]


CARD = """---
configs:
- config_name: other
  data_files: [{split: train, path: other.csv}]
- config_name: english
  data_files: [{split: train, path: data/a.csv}, {split: test, path: data/never.csv}]
---
"""


@pytest.fixture
def hub(tmp_path):
    write(tmp_path / "a.csv")
    content = (tmp_path / "a.csv").read_bytes()
    files = {
        "README.md": CARD.encode(),
        "data/a.csv": content,
        "data/never.csv": b"text\nof no use\n",
        "other.csv": b"text\nalso of no use\n",
    }
    server = Hub(files)
    yield server
    server.close()


def test_a_dataset_of_the_hub_is_copied_once_and_read_without_network(
    tmp_path, hub, capfd
):
    settings = {
        "validation_fraction": 0.5,
        "sequence_length": 4,
        "tokenizer": {"vocab_size": 270},
    }
    given = {
        "source": "huggingface",
        "dataset": DATASET,
        "dataset_config": "english",
        **settings,
    }
    data = DataConfig.model_validate(given)
    place = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    streamed = DataConfig.model_validate(given | {"streaming": True})
    first = finish_build(start_build(streamed, tmp_path / "streamed", **place))
    assert not list((tmp_path / "hf").rglob("*.csv"))
    copied = finish_build(start_build(data, tmp_path / "copied", **place))
    assert [path.name for path in (tmp_path / "hf").rglob("*.csv")] == ["a.csv"]
    hub.close()
    for number, offline in enumerate("01"):
        again = place | {"HF_HUB_OFFLINE": offline}
        alone = finish_build(start_build(data, tmp_path / f"alone{number}", **again))
        assert alone.digest == copied.digest == first.digest
    manifest = read_dataset(tmp_path / "alone1" / alone.path)
    assert manifest.meta.provenance.sources[0].facts == {"revision": COMMIT}
    for other in ({"dataset_split": "test"}, {"dataset_config": "other"}):
        never = DataConfig.model_validate(given | other)
        assert start_build(never, tmp_path / "never", **place).wait() == 1
        assert "PipelineError: data.dataset" in capfd.readouterr().err
    write(tmp_path / "folder" / "data" / "a.csv")
    files = DataConfig.model_validate({"files": [str(tmp_path / "folder")], **settings})
    assert preprocess(files, tmp_path / "files").digest == first.digest
