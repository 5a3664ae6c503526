"""Files in the folders of a text that are none: what this program writes or is given, and tables with a log of versions."""

import json
import os
from pathlib import Path

import fsspec
import pytest

from infini_llama.configs.errors import DataError
from infini_llama.configs.loading import load_config
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.flows.cli.main import main
from infini_llama.flows.pipeline import preparation_for
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.export.card import model_card
from infini_llama.tasks.preprocess.corpus import Corpus
from infini_llama.tasks.storage.artifacts import commit, staged
from infini_llama.tasks.storage.record_files import write_record
from support.records import make_lineage, make_model_facts

WRITTEN = (
    "runs/one/samples.jsonl",
    "datasets/x/tokenizer.json",
    "datasets/x/train/data.arrow",
    "units/a/b.arrow",
)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": f"words of {name}"}) + "\n")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text and a home folder in it, which is the working directory."""
    project = tmp_path / "project"
    write(project, "a.jsonl", "text/b.jsonl")
    write(project / "workspace", *WRITTEN, "mine.jsonl")
    monkeypatch.chdir(project)
    monkeypatch.delenv("INFINI_LLAMA_HOME", raising=False)  # the home is ./workspace
    return project


def texts(home: Path, **data: object) -> tuple[set[str], dict[str, int]]:
    """The names of the files of text, and how many files of the program there are by place."""
    corpus = Corpus(DataConfig.model_validate(data), home)
    return {
        file.name for part in corpus.parts for file in part.files
    }, corpus.left_out().own_files


@pytest.mark.parametrize("pattern", [".", "**/*.jsonl", "*", "../project"])
@pytest.mark.parametrize("home", ["workspace", "absolute", "../linked", "workspace/"])
def test_files_below_the_home_folder_are_left_out_and_counted(
    project: Path, pattern: str, home: str
) -> None:
    (project.parent / "linked").symlink_to(project / "workspace")
    folder = project / "workspace" if home == "absolute" else Path(home)
    found, left_out = texts(folder, files=[pattern])
    assert found == {"a.jsonl"} | ({"text/b.jsonl"} if pattern != "*" else set())
    assert list(left_out) == (
        [f"below {folder} (runtime.home)"] if pattern != "*" else []
    )
    assert (
        sum(left_out.values())
        == {".": 5, "../project": 5, "**/*.jsonl": 2, "*": 0}[pattern]
    )


def test_links_into_the_home_folder_are_left_out(project: Path) -> None:
    (project / "latest").symlink_to("workspace/runs/one")
    (project / "text" / "sample.jsonl").symlink_to(
        "../workspace/runs/one/samples.jsonl"
    )
    assert texts(Path("workspace"), files=["."])[0] == {"a.jsonl", "text/b.jsonl"}
    assert texts(Path("workspace"), files=["text/*"])[0] == {"b.jsonl"}


def test_what_was_moved_and_linked_into_the_home_folder_is_left_out(
    project: Path,
) -> None:
    (project / "workspace" / "runs").rename(project / "moved")
    (project / "workspace" / "runs").symlink_to("../moved")
    moved = project / "workspace" / "datasets" / "moved"
    with staged(moved) as folder:
        write(folder, "tokenizer.json", "train/data.jsonl")
        commit(folder, moved, "dataset", {"key": "k"})
    moved.rename(project / "dataset")
    moved.symlink_to("../../dataset")
    assert texts(Path("workspace"), files=["**/*"])[0] == {"a.jsonl", "text/b.jsonl"}


def test_a_pattern_that_begins_in_the_home_folder_names_text_of_the_users(
    project: Path,
) -> None:
    for pattern in (
        "workspace",
        "workspace/*.jsonl",
        "workspace/mine.jsonl",
        str(project / "workspace" / "**/*.jsonl"),
    ):
        assert texts(Path("workspace"), files=[pattern])[0] == {"mine.jsonl"}, pattern
    write(project, *WRITTEN)
    assert texts(Path(), files=["."])[0] == {
        "a.jsonl",
        "text/b.jsonl",
        "workspace/mine.jsonl",
    } | {f"workspace/{name}" for name in WRITTEN}


@pytest.mark.parametrize(
    "pattern",
    [
        "workspace/runs/one/samples.jsonl",
        "workspace/runs",
        "workspace/*/*/*.json",
        "link",
    ],
)
def test_text_that_only_the_program_wrote_is_refused(
    project: Path, pattern: str
) -> None:
    (project / "link").symlink_to("workspace/runs/one/samples.jsonl")
    for key in ("files", "validation_files"):
        with pytest.raises(DataError, match=rf"data\.{key}: .*runtime\.home"):
            texts(Path("workspace"), **({"files": ["text"]} | {key: [pattern]}))


def test_held_out_files_and_sources_leave_them_out_too(project: Path) -> None:
    sources = [
        {"name": "one", "files": ["."]},
        {"name": "two", "files": ["text"], "validation_files": ["**/*.jsonl"]},
    ]
    found, left_out = texts(Path("workspace"), sources=sources)
    assert found == {"a.jsonl", "text/b.jsonl"} and sum(left_out.values()) == 5


def test_a_folder_of_the_program_that_cannot_be_read_is_no_fault_of_the_text(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = os.walk

    def unreadable(root: str, onerror, followlinks: bool):
        for folder, folders, files in walk(root, followlinks=followlinks):
            if Path(folder).name == "units":
                onerror(PermissionError(13, "Permission denied", folder))
            yield folder, folders, files

    monkeypatch.setattr(os, "walk", unreadable)
    assert texts(Path("workspace"), files=["."])[0] == {"a.jsonl", "text/b.jsonl"}
    with pytest.raises(DataError, match="units cannot be read"):
        texts(Path("elsewhere"), files=["."])


def test_the_configuration_and_the_mirror_are_no_text(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration that is JSON, whose text is the folder that has it, its home and its mirror; built twice, with files added by
    the first build."""
    write(project, *(f"words-{number}.json" for number in range(30)))
    data = {
        "files": ["."],
        "sequence_length": 16,
        "validation_fraction": 0.3,
        "tokenizer": {"vocab_size": 300},
    }
    (project / "run.json").write_text(
        json.dumps({"data": data, "storage": {"mirror": "backup"}})
    )
    write(project / "backup", "runs/one/samples.jsonl")
    names = []
    for _ in range(2):
        assert main(["preprocess", "run.json", "--json"]) == 0
        printed = capsys.readouterr()
        reference = json.loads(printed.out)
        names.append(reference["path"])
        places = reference["text"]["left_out"]["own_files"]
        assert (
            places[f"{project / 'run.json'} (the configuration)"]
            == places["backup (storage.mirror)"]
            == 1
        )
    assert names[0] == names[1] and printed.err.count("(runtime.home)") == 1
    assert main(["preprocess", "run.json", "data.files=[run.json]"]) == 65
    assert "the configuration" in capsys.readouterr().err


def test_the_places_of_a_run_are_kept_where_its_configuration_is_resolved(
    project: Path,
) -> None:
    (project / "run.json").write_text(json.dumps({"data": {"files": ["*.json*"]}}))
    config = load_config("run.json")
    config = changed(
        config, runtime=changed(config.runtime, home=project / "workspace")
    )
    assert preparation_for(config).corpus.left_out().own_files == {
        f"{project / 'run.json'} (the configuration)": 1
    }


def names(folder: Path, *patterns: str) -> set[str]:
    return texts(folder / "w", files=[str(folder / pattern) for pattern in patterns])[0]


def card() -> str:
    facts = make_model_facts()
    return model_card(facts, LlamaConfig(8, 8, 8, 1, 1, 1, 8), "float32", [])


@pytest.mark.parametrize("pattern", ["", "**/*", "**/*.json*", "*/*"])
def test_runs_datasets_and_exports_are_no_text_wherever_they_lie(tmp_path, pattern):
    write(
        tmp_path, "mine/a.jsonl", "run/logs/attempt-01/time.jsonl", "run/metrics.jsonl"
    )
    write_record(tmp_path / "run" / "lineage.json", make_lineage())
    with staged(tmp_path / "old" / "set") as folder:
        write(folder, "tokenizer.json", "train/data.arrow")
        commit(folder, tmp_path / "old" / "set", "dataset", {"key": "k"})
    write(tmp_path, "out/config.json", "out/data/own.jsonl")
    (tmp_path / "out" / "README.md").write_text(card())
    found = names(tmp_path, pattern)
    own = {"", "**/*", "**/*.json*"}
    assert found == {"mine/a.jsonl"} | (
        {"out/data/own.jsonl"} if pattern in own else set()
    )


def test_a_file_of_a_run_that_is_named_is_refused(tmp_path):
    write(tmp_path, "run/metrics.jsonl")
    write_record(tmp_path / "run" / "lineage.json", make_lineage())
    with pytest.raises(DataError, match=r"only files of this program.*runs elsewhere"):
        names(tmp_path, "run/metrics.jsonl")


def test_a_text_about_exported_models_is_one(tmp_path):
    write(tmp_path, "deep/a.jsonl")
    (tmp_path / "README.md").write_text("Notes on models exported by infini-llama.")
    assert names(tmp_path, "") == {"README.md", "deep/a.jsonl"}


def test_files_of_the_same_names_that_others_wrote_are_text(tmp_path):
    write(tmp_path, "lineage.json", "manifest.json", "README.md", "deep/a.jsonl")
    assert names(tmp_path, "") == {
        "lineage.json",
        "manifest.json",
        "README.md",
        "deep/a.jsonl",
    }


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
    [
        "",
        "table",
        "table/*.parquet",
        "table/*/*.parquet",
        "table/date=1",
        "**/p.parquet.gz",
    ],
)
def test_files_of_a_table_with_a_log_of_versions_are_refused(tmp_path, log, pattern):
    write(
        tmp_path,
        f"table/{log}",
        "table/a.parquet",
        "table/date=1/p.parquet.gz",
        "b.jsonl",
    )
    write(tmp_path, "table/date=1/c.parquet")
    with pytest.raises(
        DataError, match=r"data\.files: .*has files of .*table, a table of"
    ):
        names(tmp_path, pattern)
    assert names(tmp_path, "b.jsonl") == {"b.jsonl"}


def test_a_table_as_a_dataset_of_hugging_face_is_refused(tmp_path):
    write(tmp_path, "table/_delta_log/0.json", "table/a.parquet")
    with pytest.raises(DataError, match=r"data\.dataset: .*, a table of Delta Lake"):
        Corpus(
            DataConfig(source="huggingface", dataset=str(tmp_path / "table")),
            tmp_path / "w",
        )


def test_words_beside_a_table_and_folders_of_similar_names_are_text(tmp_path):
    write(
        tmp_path,
        "_delta_log/0.json",
        "notes.md",
        "other/metadata/a.json",
        "other/b.parquet",
    )
    assert names(tmp_path, "*.md") == {"notes.md"}
    write(tmp_path / "more", "metadata/a.json", "b.parquet", "snapshot/a.json")
    with pytest.raises(DataError):
        names(tmp_path, "other")
    (tmp_path / "_delta_log" / "0.json").unlink()
    (tmp_path / "_delta_log").rmdir()
    assert names(tmp_path, "more") == {
        "metadata/a.json",
        "b.parquet",
        "snapshot/a.json",
    }


@pytest.mark.parametrize("log", ["_delta_log/0.json", "metadata/v1.metadata.json"])
@pytest.mark.parametrize(
    "pattern", ["", "/*.parquet", "/date=1/*.parquet", "/**/c.parquet"]
)
def test_a_table_elsewhere_is_refused(tmp_path, log, pattern):
    files = fsspec.filesystem("memory")
    for path in (log, "a.parquet", "date=1/c.parquet"):
        files.pipe(f"/bucket/table-{log[0]}/{path}", b"content")
    with pytest.raises(DataError, match="a table of"):
        Corpus(DataConfig(files=[f"memory://bucket/table-{log[0]}{pattern}"]), tmp_path)
