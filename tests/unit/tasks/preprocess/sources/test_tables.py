"""Tables of documents on disk: what is a copy of what, and several processes that write them."""

import json
import random

import numpy as np
import pytest

from infini_llama.tasks.preprocess.sources import survey_cache, tables
from support.stages import preprocess, survey


@pytest.mark.parametrize("total", [1, 40, 5000])
def test_each_copy_is_found_in_parts_that_are_sorted_by_themselves(tmp_path, monkeypatch, total):
    monkeypatch.setattr(tables, "BUCKET", 300)
    choose = random.Random(total)
    kinds = [choose.randbytes(32) for _ in range(total // 2 + 1)]
    kinds += [kind[:8] + choose.randbytes(24) for kind in kinds]  # equal in one half alone
    hashes = [choose.choice(kinds) for _ in range(total)]
    expected = [hashes.index(one) for one in hashes]
    table = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
    found = tables.first_of_each([table[start : start + 77] for start in range(0, total, 77)], total, tmp_path)
    assert found.tolist() == expected and not list(tmp_path.iterdir())


def fill(folder) -> None:
    folder.mkdir()
    for number in range(12):
        texts = [f"text {number // 2} {line}: größer " * (line % 7) for line in range(200)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(lines + "broken\n" * (number == 3))


@pytest.mark.parametrize("deduplicate", [False, True])
def test_any_number_of_workers_and_blocks_finds_the_same(data, digests, tmp_path, monkeypatch, deduplicate):
    fill(tmp_path / "text")
    given = data(files=[str(tmp_path / "text")], on_bad_input="skip", deduplicate=deduplicate, shard_size=30_000)
    here = preprocess(given, str(tmp_path / "one"))
    monkeypatch.setattr(survey_cache, "WORTH_WORKERS", 0)
    monkeypatch.setattr(survey_cache, "SETTLED", 0)
    monkeypatch.setattr(tables, "BUCKET", 100)
    assert preprocess(given | {"num_workers": 2}, str(tmp_path / "two")) == here
    assert digests(tmp_path / "two" / "datasets") == digests(tmp_path / "one" / "datasets")
    first, again = survey(given), survey(given | {"num_workers": 2}, tmp_path / "two" / "surveys")
    assert (again.identity, again.report) == (first.identity, first.report)
    assert again.report.duplicates and again.report.bad_records == 1


def test_many_tables_of_a_folder_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr(survey_cache, "SETTLED", 0)
    monkeypatch.setattr(survey_cache, "SEVERAL", 2)
    monkeypatch.setattr(survey_cache, "LEFT_BEHIND", -1)
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number}")
        found = survey({"files": [str(tmp_path / "text")]}, tmp_path / "notes").identity
        assert found == survey({"files": [str(tmp_path / "text")]}).identity
    assert len(list((tmp_path / "notes").glob("*.rows"))) <= 3
