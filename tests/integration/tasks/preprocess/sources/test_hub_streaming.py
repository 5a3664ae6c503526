"""A split that `datasets` reads as a stream: the same documents and bytes, and no copy of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.states import Failed

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.tasks.preprocess.sources import huggingface
from infini_llama.tasks.preprocess.sources.hub import Revision
from infini_llama.tasks.preprocess.sources.huggingface import Split
from infini_llama.tasks.preprocess.sources.texts import Fault
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.task import _is_transient

ROWS = [
    {"id": n, "body": None if n % 50 == 7 else f"row {n}: größer, 日本語 " * (n % 9)}
    for n in range(700)
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(params=["parquet", "jsonl", "csv"])
def folder(request, tmp_path):
    """A folder as on the Hub, whose card has an option of reading, so that `datasets` reads it."""
    data = tmp_path / "hub" / "data"
    data.mkdir(parents=True)
    option = "columns: [id, body]" if request.param == "parquet" else "chunksize: 5000"
    (tmp_path / "hub" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: data/*\n  {option}\n---\n"
    )
    for part in range(3):
        rows = ROWS[part * 250 : (part + 1) * 250]
        table = datasets.Dataset.from_list(rows)
        path = data / f"train-{part:05d}-of-00003.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
        elif request.param == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            table.to_csv(str(path))
    return tmp_path / "hub"


def split_of(folder, text_column):
    return Split(
        dataset=str(folder),
        configuration=None,
        name="train",
        revision=Revision(None),
        streaming=True,
        text_column=text_column,
    )


def test_a_stream_gives_the_bytes_of_the_copy_and_leaves_none(
    data, folder, cache, tmp_path, digests
):
    given = {
        "source": "huggingface",
        "dataset": str(folder),
        "text_column": "body",
        "files": [],
        "deduplicate": True,
    }
    streamed = preprocess(data(**given, streaming=True), tmp_path / "streamed")
    assert not list(cache.rglob("*.arrow"))
    copied = preprocess(data(**given), tmp_path / "copied")
    assert list(cache.rglob("*.arrow")) and streamed == copied
    assert digests(tmp_path / "streamed" / "datasets") == digests(
        tmp_path / "copied" / "datasets"
    )


def test_few_rows_are_held_at_a_time(folder, cache, monkeypatch):
    opened, seen = huggingface._opened, []

    class Watched:
        """The stream itself; how far it has been read when its rows are taken is noted."""

        def __init__(self, dataset):
            self.dataset, self.column_names = dataset, None

        def with_format(self, form):
            return self

        def iter(self, batch_size):
            for batch in self.dataset.iter(batch_size):
                seen.append(len(batch["id"]))
                yield batch

    monkeypatch.setattr(huggingface, "_opened", lambda *given: Watched(opened(*given)))
    texts = split_of(folder, "body")._rows(None)
    for _ in range(10):
        next(texts)
    assert sum(seen) <= huggingface.AT_ONCE
    assert (
        10 + len(list(texts)) == len(ROWS) == sum(seen)
        and max(seen) <= huggingface.AT_ONCE
    )


def test_errors_of_a_stream_are_reported(data, folder, cache, tmp_path):
    given = {
        "source": "huggingface",
        "dataset": str(folder),
        "files": [],
        "streaming": True,
    }
    with pytest.raises(DataError, match=r"hub.*text.*'id', 'body'"):
        preprocess(data(**given), tmp_path / "home")
    with pytest.raises(DataError, match="nothing"):
        preprocess(
            data(**given, text_column="body", dataset_split="nothing"),
            tmp_path / "home",
        )
    records = list(split_of(folder, "id").records())
    # Numbers are no text.
    assert len(records) == len(ROWS) and all(
        isinstance(record, Fault) for record in records
    )
    last = sorted((folder / "data").iterdir())[-1]
    last.write_bytes(b'"\xff\xfe never a file\n')
    with pytest.raises(DataError, match="hub"):
        preprocess(data(**given, text_column="body"), tmp_path / "home")


class Breaking:
    """A stream that ends after its first rows, as where a connection is cut."""

    column_names = None

    def __init__(self, dataset, error):
        self.dataset, self.error = dataset, error

    def with_format(self, form):
        return self

    def iter(self, batch_size):
        yield next(iter(self.dataset.iter(batch_size)))
        raise self.error


@pytest.mark.parametrize(
    ("dataset", "error"),
    [
        (None, ConnectionResetError("reset by peer")),
        (None, TimeoutError("no byte for 60 s")),
        (
            "owner/name",
            ValueError("closed without the rest"),
        ),  # whatever a reader makes of a cut connection
    ],
)
@pytest.mark.parametrize("on_bad_input", ["fail", "skip"])
def test_a_stream_that_breaks_off_is_no_bad_text(
    data, folder, cache, tmp_path, monkeypatch, dataset, error, on_bad_input
):
    opened = huggingface._opened
    nothing = SimpleNamespace(config=SimpleNamespace(data_files=None))
    monkeypatch.setattr(huggingface.HuggingFace, "_builder", lambda source: nothing)
    monkeypatch.setattr(
        huggingface,
        "_opened",
        lambda split: Breaking(opened(replace(split, dataset=str(folder))), error),
    )
    given = {
        "source": "huggingface",
        "dataset": dataset or str(folder),
        "text_column": "body",
        "files": [],
    }
    with pytest.raises(PipelineError, match="'train'") as found:
        preprocess(
            data(**given, streaming=True, on_bad_input=on_bad_input), tmp_path / "home"
        )
    assert found.value.exit_code == 70
    monkeypatch.setattr(
        huggingface,
        "_opened",
        lambda split: opened(replace(split, dataset=str(folder))),
    )
    with pytest.raises(DataError, match="'text'"):
        preprocess(
            data(**given | {"text_column": "text"}, streaming=True), tmp_path / "home"
        )


def test_an_unreachable_hub_is_not_bad_input(data, cache, tmp_path, monkeypatch):
    for place in (
        "huggingface_hub.constants",
        "datasets.config",
    ):  # read when they were imported
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", True)
    given = {
        "source": "huggingface",
        "dataset": "owner/never-fetched",
        "files": [],
        "on_bad_input": "skip",
    }
    with pytest.raises(PipelineError, match="owner/never-fetched") as found:
        preprocess(data(**given, streaming=True), tmp_path / "home")
    assert found.value.exit_code == 70


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (PipelineError("cut"), True),
        (OSError("disk"), True),
        (DataError("bad"), False),
        (ConfigError("bad"), False),
    ],
)
def test_only_transient_errors_are_retried(error, again):
    assert _is_transient(None, None, Failed(data=error)) == again
