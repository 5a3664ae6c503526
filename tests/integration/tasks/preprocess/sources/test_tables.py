"""Several processes that survey files find what one finds."""

import json

import pytest

from infini_llama.tasks.preprocess.sources import scanning, survey_cache, tables
from support.stages import preprocess, survey


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
    monkeypatch.setattr(scanning, "WORTH_WORKERS", 0)
    monkeypatch.setattr(survey_cache, "SETTLED", -(10**9))
    monkeypatch.setattr(tables, "BUCKET", 100)
    assert preprocess(given | {"num_workers": 2}, str(tmp_path / "two")) == here
    assert digests(tmp_path / "two" / "datasets") == digests(tmp_path / "one" / "datasets")
    first, again = survey(given), survey(given | {"num_workers": 2}, tmp_path / "two" / "surveys")
    assert (again.identity, again.report) == (first.identity, first.report)
    assert again.report.duplicates and again.report.bad_records == 1
