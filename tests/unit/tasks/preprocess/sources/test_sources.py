import os
import sysconfig
from pathlib import Path

import pytest
from blake3 import blake3

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources.documents import Documents, identities_of
from infini_llama.tasks.preprocess.sources.sources import describe
from support.stages import survey


def section(**given: object) -> dict:
    return DataConfig.model_validate(given).model_dump(mode="json")


def read(*files: object) -> list[Documents]:
    corpus = survey(section(files=[str(file) for file in files]))
    return sorted(corpus.train + corpus.validation, key=lambda documents: documents.source.name)


def facts(*files: object) -> list[tuple[str, bytes]]:
    return [
        (documents.source.name, b"".join(block["hash"].tobytes() for block in documents.blocks()))
        for documents in read(*files)
    ]


def names(*files: object) -> list[str]:
    return [documents.source.name for documents in read(*files)]


def test_documents_are_sorted_named_from_the_first_wildcard_and_hashed(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("b/2.txt", "zwei ü"), ("a.txt", "one"), ("c.md", "no")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = read(tmp_path / "**/*.txt")
    assert identities_of(found) == [
        ["a.txt", 3, blake3(b"one").hexdigest()],
        ["b/2.txt", 7, blake3("zwei ü".encode()).hexdigest()],
    ]
    assert list(found[1].texts()) == [("zwei ü", 7)]


def test_names_and_hashes_do_not_depend_on_where_the_text_lies_or_how_it_is_called(tmp_path, monkeypatch):
    for place in ("here", "there/deep"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "x.txt").write_text("same")
    found = [facts(tmp_path / place / "**/*.txt") for place in ("here", "there/deep")]
    monkeypatch.chdir(tmp_path / "here")
    found.append(facts("**/*.txt"))
    assert found[0] == found[1] == found[2]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/here/**/*.txt") == ["sub/x.txt"]


def test_a_file_that_several_patterns_match_is_one_document(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "link.txt").symlink_to("x.txt")
    assert len(read(tmp_path / "*.txt", tmp_path / "x.txt", tmp_path / "**/*")) == 1


def test_hidden_files_need_their_dot_in_the_pattern_and_brackets_may_be_part_of_a_name(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in (".git/x.txt", ".hidden.txt", "a[1].txt"):
        (tmp_path / name).write_text(name)
    assert names(tmp_path / "**/*.txt") == ["a[1].txt"]
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]
    assert names(tmp_path / ".*.txt") == [".hidden.txt"]


def test_a_file_that_is_removed_between_survey_and_encoding_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    [documents] = read(tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt"):
        list(documents.texts())


def test_a_file_name_that_is_not_utf_8_is_accepted(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text")
    assert names(tmp_path / "*.txt") == [r"caf\xe9.txt"]


def test_empty_files_are_no_documents(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "x.txt").write_text("x")
    assert names(tmp_path / "*.txt") == ["x.txt"]


def test_each_bad_input_has_its_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("good")
    with pytest.raises(DataError, match=rf"nothing/\*\.txt.*{tmp_path}"):
        read("good.txt", "nothing/*.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").touch()
    with pytest.raises(DataError, match=r"folder.* txt, md, json, "):
        read(tmp_path / "folder")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"bad\.txt .*byte 3: 0xe9"):
        read("*.txt")
    (tmp_path / "bad.txt").unlink()
    assert DataError.exit_code == 65


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has a file that nobody can read from its start")
def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"broken\.txt .*Input/output error"):
        read(tmp_path / "*.txt")


def test_a_file_that_changes_after_it_was_hashed_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("before")
    [documents] = read(tmp_path / "x.txt")
    for change in (lambda file: file.write_text("behind"), lambda file: file.write_bytes(b"caf\xe9")):
        change(tmp_path / "x.txt")
        with pytest.raises(DataError, match="changed"):
            list(documents.texts())


def test_the_standard_library_is_python_text_without_tests_and_packages():
    corpus = survey(section(source="python-stdlib"))
    found = corpus.train + corpus.validation
    assert len(found) > 300 and sum(documents.size for documents in found) > 5_000_000
    found_names = {documents.source.name for documents in found}
    assert {"os.py", "json/decoder.py"} <= found_names
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert not any(skipped & set(Path(name).parts) for name in found_names)
    assert all(name.endswith(".py") for name in found_names)
    assert all(str(documents.source.path).startswith(sysconfig.get_path("stdlib")) for documents in found)
    assert describe(DataConfig(source="python-stdlib")).license == "PSF-2.0"
