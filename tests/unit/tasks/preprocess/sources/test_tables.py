"""Tables of documents on disk: what is a copy of what, and how many tables stay."""

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest

from infini_llama.tasks.preprocess.sources import documents, survey_cache, tables
from support.stages import survey


@pytest.mark.parametrize("total", [1, 40, 5000])
def test_each_copy_is_found_in_parts_that_are_sorted_by_themselves(tmp_path, monkeypatch, total):
    monkeypatch.setattr(tables, "BUCKET", 300)
    choose = random.Random(total)
    kinds = [choose.randbytes(32) for _ in range(total // 2 + 1)]
    kinds += [kind[:8] + choose.randbytes(24) for kind in kinds]  # equal in one half alone
    hashes = [choose.choice(kinds) for _ in range(total)]
    firsts = np.array([hashes.index(one) for one in hashes])
    table = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)

    def found(holds):
        return tables.by_first((table[start : start + 77] for start in range(0, total, 77)), total, tmp_path, holds)

    assert (found(lambda number, first: number == first) == (firsts == np.arange(total))).all()
    assert (found(lambda number, first: first >= total // 3) == (firsts >= total // 3)).all()
    assert not list(tmp_path.iterdir())


def test_copies_are_found_with_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BUCKET", 10)
    monkeypatch.setattr(tables, "BUCKETS", 8)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 30, limits[1]))
    try:
        hashes = np.random.default_rng(1).integers(0, 256, (400, 32), dtype=np.uint8)
        twice = np.concatenate([hashes, hashes])
        mask = tables.by_first([twice], len(twice), tmp_path, lambda number, first: number == first)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert mask.tolist() == [True] * 400 + [False] * 400


def test_documents_from_any_number_on_are_the_rest_of_all(tmp_path, monkeypatch):
    for module in (tables, documents):
        monkeypatch.setattr(module, "BLOCK", 8)
    lines = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(60))
    (tmp_path / "a.jsonl").write_text(lines)
    corpus = survey({"files": [str(tmp_path)], "validation_fraction": 0.5})
    for (some,) in (corpus.train, corpus.validation):
        numbers = [number for block in some.blocks() for number in block["number"].tolist()]
        assert some.kept is not None and len(numbers) == len(some) > 16
        for first in range(len(some) + 1):
            assert [number for block in some.blocks(first) for number in block["number"].tolist()] == numbers[first:]
            assert [text for text, _ in some.texts(first)] == [f"text {number}" for number in numbers[first:]]


def test_many_tables_of_a_folder_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr(survey_cache, "SETTLED", -(10**9))
    monkeypatch.setattr(survey_cache, "SEVERAL", 2)
    monkeypatch.setattr(survey_cache, "LEFT_BEHIND", -1)
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number}")
        found = survey({"files": [str(tmp_path / "text")]}, tmp_path / "notes").identity
        assert found == survey({"files": [str(tmp_path / "text")]}).identity
    assert len(list((tmp_path / "notes").glob("*.rows"))) <= 3


def test_runs_have_the_rows_in_order_and_are_read_as_they_are_asked_for():
    read = []
    blocks = (read.append(start) or np.arange(start, start + 10) for start in range(0, 60, 10))
    runs = tables.by_length(blocks, [25, 0, 5, 30])
    first = next(runs)
    assert next(first).tolist() == list(range(10)) and read == [0], "not the whole run"
    found = [[value for part in run for value in part.tolist()] for run in runs]
    assert found == [[], list(range(25, 30)), list(range(30, 60))], "what was not read is passed over"
