"""The workers of a cluster find what this process finds, of the same text alone."""

import json
import logging
import pickle
import sys
from contextlib import contextmanager

import pytest

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.tasks.preprocess.sources import scanning, survey_cache
from infini_llama.tasks.preprocess.sources import survey as surveys
from infini_llama.tasks.progress import progress_of
from support.stages import survey


class Elsewhere:
    """A cluster: what it is given and what it answers is pickled, and parts are done in any order, some of them twice."""

    workers = 2

    def __init__(self):
        self.runs = []

    def run(self, work, shared, parts, witness):
        assert witness.is_file()
        self.runs.append(len(parts))
        for part in reversed(parts):
            work(*pickle.loads(pickle.dumps((shared, part))))
            (part.file.with_name(f"{part.file.stem}-lost-7.rows")).write_bytes(b"half a t")
            yield part, pickle.loads(pickle.dumps(work(shared, part)))


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(scanning, "WORTH_WORKERS", 0)
    monkeypatch.setattr(survey_cache, "SETTLED", -(10**9))
    found = Elsewhere()
    found.opened = 0

    @contextmanager
    def opened(data):
        found.opened += 1
        yield found

    monkeypatch.setattr(scanning, "open_cluster", opened)
    return found


@pytest.fixture
def text(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(9):
            lines = "".join(
                json.dumps({"text": f"text {number % 4} {line} " * (line % 7)}) + "\n" for line in range(50)
            )
            (tmp_path / folder / f"{number}.jsonl").write_text(lines + "broken\n" * (number == 3))
    return tmp_path


@pytest.mark.parametrize("changes", [{}, {"near_duplicates": 0.8}])
def test_a_cluster_finds_what_this_process_finds_and_is_opened_once(data, text, tmp_path, cluster, caplog, changes):
    if changes:
        pytest.importorskip("rensa")
    sources = [{"name": name, "files": [str(text / name)]} for name in ("a", "b")]
    given = data(files=[], sources=sources, on_bad_input="skip", deduplicate=True, **changes)
    expected, notes = survey(given), tmp_path / "notes"
    assert cluster.opened == 0
    caplog.set_level(logging.INFO)
    found = survey(given | {"engine": "dask", "num_workers": 3}, notes)
    assert (found.identity, found.report) == (expected.identity, expected.report)
    assert cluster.opened == 1 and len(cluster.runs) == 2 and min(cluster.runs) > 4
    assert len(list(filter(None, map(progress_of, caplog.records)))) == sum(cluster.runs) - 2  # not where all is done
    assert not [path for path in notes.iterdir() if "lost" in path.name or path.name.startswith(scanning.PASSING)]
    again = survey(given, notes)  # without a cluster, from what it has noted
    assert (again.identity, again.report) == (expected.identity, expected.report)
    assert survey(given | {"engine": "dask"}, notes).identity == expected.identity
    assert cluster.opened == 1


def test_what_was_found_before_a_failure_is_not_read_again(data, text, tmp_path, cluster, monkeypatch):
    given = data(files=[str(text / "a"), str(text / "b")], engine="ray")
    with pytest.raises(DataError, match=r"3\.jsonl"):  # damaged
        survey(given, tmp_path / "notes")
    read, scan = [], surveys.scan_source
    monkeypatch.setattr(
        surveys, "scan_source", lambda source, *rest, **more: (read.append(source.name), scan(source, *rest, **more))[1]
    )
    survey(
        given | {"engine": "local", "on_bad_input": "fail", "files": [str(text / "b" / "[5-8].jsonl")]},
        tmp_path / "notes",
    )
    assert not read


def test_a_worker_with_other_text_is_refused(text, tmp_path, data):
    (source,) = surveys.sources(surveys.DataConfig.model_validate(data(files=[str(text / "a" / "1.jsonl")])))[0]
    stale = scanning.Stale(0, source, "key", None, scanning.size_here(source))
    batch = scanning.Batch([stale], tmp_path / "key-table.rows")
    scan = surveys.partial(surveys.scan_source, min_length=0, skip=True)
    assert scanning._scan_elsewhere(scan, batch)[0].rows.count
    (text / "a" / "1.jsonl").unlink()
    with pytest.raises(PipelineError, match=r"1\.jsonl.*data\.files"):
        scanning._scan_elsewhere(scan, batch)


def test_an_engine_that_is_not_installed_is_named(data, text, tmp_path, monkeypatch):
    monkeypatch.setattr(scanning, "WORTH_WORKERS", 0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"data\.engine=ray.*infini-llama\[ray\]"):
        survey(data(files=[str(text / "a")], engine="ray", on_bad_input="skip"), tmp_path / "notes")
