"""What this program wrote is no text wherever it lies, and files of a table with a log of versions are refused."""

import json
from pathlib import Path

import fsspec
import pytest

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.export.card import ModelFacts, model_card
from infini_llama.tasks.preprocess.corpus import Corpus
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import commit, staged
from infini_llama.tasks.storage.record_files import write_record


class Lineage(Record):
    run: str


def names(folder: Path, *patterns: str) -> set[str]:
    corpus = Corpus(DataConfig(files=[str(folder / pattern) for pattern in patterns]), folder / "w")
    return {file.name for part in corpus.parts for file in part.files}


def write(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps({"text": f"words of {path}"}) + "\n")


def card() -> str:
    facts = ModelFacts(
        run="one",
        step=1,
        tokens=1,
        parameters=1,
        validation_loss=None,
        bits_per_byte=None,
        dataset="d",
        dataset_digest="d",
        sequence_length=8,
        vocabulary=8,
        weights_sha256="0",
        infini_llama="1",
        sample_prompt="",
        split_special_tokens=True,
        global_batch_size=1,
        learning_rate=0.1,
        seed=0,
    )
    return model_card(facts, LlamaConfig(8, 8, 8, 1, 1, 1, 8), "float32", [])


@pytest.mark.parametrize("pattern", ["", "**/*", "**/*.json*", "*/*"])
def test_runs_datasets_and_exports_are_no_text_wherever_they_lie(tmp_path, pattern):
    write(tmp_path, "mine/a.jsonl", "run/logs/attempt-01/time.jsonl", "run/metrics.jsonl")
    write_record(tmp_path / "run" / "lineage.json", Lineage(run="one"))
    with staged(tmp_path / "old" / "set") as folder:
        write(folder, "tokenizer.json", "train/data.arrow")
        commit(folder, tmp_path / "old" / "set", "dataset", {"key": "k"})
    write(tmp_path, "out/config.json", "out/data/own.jsonl")
    (tmp_path / "out" / "README.md").write_text(card())
    found = names(tmp_path, pattern)
    own = {"", "**/*", "**/*.json*"}
    assert found == {"mine/a.jsonl"} | ({"out/data/own.jsonl"} if pattern in own else set())


def test_a_file_of_a_run_that_is_named_is_refused(tmp_path):
    write(tmp_path, "run/metrics.jsonl")
    write_record(tmp_path / "run" / "lineage.json", Lineage(run="one"))
    with pytest.raises(DataError, match=r"only files of this program.*runs elsewhere"):
        names(tmp_path, "run/metrics.jsonl")


def test_files_of_the_same_names_that_others_wrote_are_text(tmp_path):
    write(tmp_path, "lineage.json", "manifest.json", "README.md", "deep/a.jsonl")
    assert names(tmp_path, "") == {"lineage.json", "manifest.json", "README.md", "deep/a.jsonl"}


LOGS = [
    "_delta_log/00000000000000000000.json",
    ".hoodie/hoodie.properties",
    "metadata/v1.metadata.json",
    "metadata/00001-5e.metadata.json",
    "snapshot/snapshot-1",
    "_spark_metadata/0",
]


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize(
    "pattern",
    ["", "table", "table/*.parquet", "table/*/*.parquet", "table/date=1", "**/p.parquet.gz"],
)
def test_files_of_a_table_with_a_log_of_versions_are_refused(tmp_path, log, pattern):
    write(tmp_path, f"table/{log}", "table/a.parquet", "table/date=1/p.parquet.gz", "b.jsonl")
    write(tmp_path, "table/date=1/c.parquet")
    with pytest.raises(DataError, match=r"data\.files: .*has files of .*table, a table of"):
        names(tmp_path, pattern)
    assert names(tmp_path, "b.jsonl") == {"b.jsonl"}


def test_a_table_as_a_dataset_of_hugging_face_is_refused(tmp_path):
    write(tmp_path, "table/_delta_log/0.json", "table/a.parquet")
    with pytest.raises(DataError, match=r"data\.dataset: .*, a table of Delta Lake"):
        Corpus(DataConfig(source="huggingface", dataset=str(tmp_path / "table")), tmp_path / "w")


def test_words_beside_a_table_and_folders_of_similar_names_are_text(tmp_path):
    write(tmp_path, "_delta_log/0.json", "notes.md", "other/metadata/a.json", "other/b.parquet")
    assert names(tmp_path, "*.md") == {"notes.md"}
    write(tmp_path / "more", "metadata/a.json", "b.parquet", "snapshot/a.json")
    with pytest.raises(DataError):
        names(tmp_path, "other")
    (tmp_path / "_delta_log" / "0.json").unlink()
    (tmp_path / "_delta_log").rmdir()
    assert names(tmp_path, "more") == {"metadata/a.json", "b.parquet", "snapshot/a.json"}


@pytest.mark.parametrize("log", ["_delta_log/0.json", "metadata/v1.metadata.json"])
@pytest.mark.parametrize("pattern", ["", "/*.parquet", "/date=1/*.parquet", "/**/c.parquet"])
def test_a_table_elsewhere_is_refused(tmp_path, log, pattern):
    files = fsspec.filesystem("memory")
    for path in (log, "a.parquet", "date=1/c.parquet"):
        files.pipe(f"/bucket/table-{log[0]}/{path}", b"content")
    with pytest.raises(DataError, match="a table of"):
        Corpus(DataConfig(files=[f"memory://bucket/table-{log[0]}{pattern}"]), tmp_path)
