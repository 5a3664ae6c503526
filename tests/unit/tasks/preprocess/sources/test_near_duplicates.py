"""Documents with nearly the same words: the first stays, the others are dropped and counted, however they are read."""

import json
import random
import sys

import numpy as np
import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.sources import documents as documents_module
from infini_llama.tasks.preprocess.sources import near_duplicates as near
from infini_llama.tasks.preprocess.sources import survey_cache, tables, texts
from support.stages import plan, preprocess, survey

VOCABULARY = [f"word{number}" for number in range(3000)]


def similarity(first: str, second: str) -> float:
    one, other = (
        {tuple(words[place : place + 5]) for place in range(len(words) - 4)}
        for words in (first.split(), second.split())
    )
    return len(one & other) / len(one | other)


def changed(text: str, words: int, choose: random.Random) -> str:
    parts = text.split()
    for place in choose.sample(range(len(parts)), words):
        parts[place] = choose.choice(VOCABULARY)
    return " ".join(parts)


@pytest.fixture(autouse=True)
def installed(request):
    if "not_installed" not in request.node.name:
        pytest.importorskip("rensa")


@pytest.fixture
def documents():
    """Thirty unlike texts; of each a copy with few other words and one with many, all in random order."""
    choose = random.Random(3)
    originals = [" ".join(choose.choices(VOCABULARY, k=400)) for _ in range(30)]
    many = [
        *originals,
        *(changed(text, 3, choose) for text in originals),
        *(changed(text, 90, choose) for text in originals),
    ]
    choose.shuffle(many)
    return many


@pytest.fixture
def text(tmp_path, documents):
    (tmp_path / "text").mkdir()
    for number in range(9):
        lines = (json.dumps({"text": text}) for text in documents[number * 10 : number * 10 + 10])
        (tmp_path / "text" / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "text"


def kept(found) -> list[str]:
    several = [*found.train, *found.validation]
    return sorted(text for documents in several for text, _ in documents.texts())


def test_the_first_of_several_documents_alike_stays(text, documents, data):
    first = [
        one for number, one in enumerate(documents) if all(similarity(one, other) < 0.8 for other in documents[:number])
    ]
    assert 0 < len(first) < len(documents)
    found = survey(data(files=[str(text)], near_duplicates=0.8))
    assert kept(found) == sorted(first)
    report = found.report
    assert (report.records, report.near_duplicates) == (90, 90 - len(first)) and report.duplicates_dropped
    assert len(report.near) == near.NAMED and all(".jsonl (record " in words for words in report.near)
    assert kept(survey(data(files=[str(text)], near_duplicates=1))) == sorted(documents)
    assert kept(survey(data(files=[str(text)]))) == sorted(documents)


def test_blocks_workers_and_caches_change_nothing(text, data, tmp_path, monkeypatch):
    given = data(files=[str(text)], near_duplicates=0.8)
    expected = survey(given)
    monkeypatch.setattr(survey_cache, "SETTLED", -(10**9))
    monkeypatch.setattr(survey_cache, "SEVERAL", 2)
    monkeypatch.setattr(texts, "AT_ONCE", 3)
    for module in (tables, documents_module, near):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(tables, "BUCKET", 9)
    for _ in range(2):  # the second time from the notes
        found = survey(given, tmp_path / "notes")
        assert (found.identity, found.report) == (expected.identity, expected.report)
    plain = survey(data(files=[str(text)]), tmp_path / "other notes")  # whose tables have no sketches
    assert plain.report.near_duplicates == 0 and plain.identity == survey(data(files=[str(text)])).identity
    assert survey(given, tmp_path / "other notes").identity == expected.identity


def test_a_key_is_that_of_the_documents_that_are_kept(text, data, tmp_path):
    given = data(files=[str(text)])
    assert plan(given | {"near_duplicates": 1.0}, tmp_path)["key"] == plan(given, tmp_path)["key"]
    assert plan(given | {"near_duplicates": 0.8}, tmp_path)["key"] != plan(given, tmp_path)["key"]


def test_training_text_like_held_out_text_is_dropped(text, documents, data, tmp_path):
    choose = random.Random(4)
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"text": changed(documents[0], 2, choose)}))
    found = survey(data(files=[str(text)], validation_files=[str(tmp_path / "held-out.jsonl")], near_duplicates=0.8))
    assert len(found.validation) == 1 and len(found.validation[0]) == 1
    assert documents[0] not in kept(found)


def test_exact_copies_are_counted_as_such(data, tmp_path):
    choose = random.Random(5)
    texts = [" ".join(choose.choices(VOCABULARY, k=50)) for _ in range(6)]
    for number, text in enumerate([*texts, texts[0], texts[1].upper(), "?!", "...", "...", "short text"]):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    report = survey(data(files=[f"{tmp_path}/*.txt"], near_duplicates=0.9)).report
    assert (report.duplicates, report.near_duplicates) == (2, 1)
    assert report.near == (f"{tmp_path}/07.txt (record 1) is like {tmp_path}/01.txt (record 1): 1.00",)


def test_a_sketch_estimates_the_similarity_of_words_in_a_row(monkeypatch):
    choose, errors = random.Random(6), []
    for _ in range(40):
        one = " ".join(choose.choices(VOCABULARY, k=500))
        other = changed(one, choose.randint(0, 40), choose)
        first, second = near.sketches([one, other])
        errors.append(((first == second).mean() * 256 - 1) / 255 - similarity(one, other))
    assert abs(np.mean(errors)) < 0.03 and max(map(abs, errors)) < 0.15
    whole = near.sketches([one])[0]
    assert (near.sketches(["other", one, "日本語のテキスト"])[1] == whole).all()
    assert (near.sketches([one.upper().replace(" ", ",\n ")])[0] == whole).all()
    monkeypatch.setattr(near, "PART", 1000)
    assert (
        near.sketches(["other", one, "x"])[1] == whole
    ).mean() > 0.85  # words in a row at the ends of parts are lost


def test_text_without_blanks_is_compared_letter_by_letter():
    choose = random.Random(7)
    one = "".join(chr(choose.randrange(0x4E00, 0x5000)) for _ in range(300))
    first, second, third = near.sketches([one, one[:290] + "日" * 10, one[::-1]])
    assert (first == second).mean() > 0.8 and (first == third).mean() < 0.1


def test_it_is_in_the_manifest_and_on_the_page(text, data, tmp_path):
    from support.stages import describe

    reference = preprocess(data(files=[str(text)], near_duplicates=0.8), tmp_path)
    left_out = describe(tmp_path / reference["path"])["left_out"]
    assert left_out["near_duplicates"] > 20 and len(left_out["near"]) == near.NAMED


def test_a_library_that_is_not_installed_is_named(data, monkeypatch):
    near.library.cache_clear()
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ConfigError, match=r"data\.near_duplicates.*infini-llama\[near-duplicates\]"):
        survey(data(near_duplicates=0.8))
