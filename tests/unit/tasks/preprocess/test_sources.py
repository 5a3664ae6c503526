import os
import sysconfig
from pathlib import Path

import pytest
from blake3 import blake3

from configs.errors import DataError
from tasks.preprocess.sources import describe, documents


def read(*files: object) -> list:
    return documents({"source": "files", "files": [str(file) for file in files]})


def names(*files: object) -> list[str]:
    return [document.name for document in read(*files)]


def test_documents_are_sorted_named_from_the_first_wildcard_and_hashed(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("b/2.txt", "zwei ü"), ("a.txt", "one"), ("c.md", "no")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = read(tmp_path / "**/*.txt")
    assert [(document.name, document.size) for document in found] == [("a.txt", 3), ("b/2.txt", 7)]
    assert found[1].hash == blake3("zwei ü".encode()).hexdigest() and found[1].text() == "zwei ü"


def test_names_and_hashes_do_not_depend_on_where_the_text_lies_or_how_it_is_called(tmp_path, monkeypatch):
    for place in ("here", "there/deep"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "x.txt").write_text("same")
    facts = [
        [(document.name, document.hash) for document in read(tmp_path / place / "**/*.txt")]
        for place in ("here", "there/deep")
    ]
    monkeypatch.chdir(tmp_path / "here")
    facts.append([(document.name, document.hash) for document in read("**/*.txt")])
    assert facts[0] == facts[1] == facts[2]
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


def test_a_name_that_is_not_utf_8_is_no_obstacle(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text")
    assert names(tmp_path / "*.txt") == [r"caf\xe9.txt"]


def test_empty_files_are_no_documents(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "x.txt").write_text("x")
    assert names(tmp_path / "*.txt") == ["x.txt"]


def test_each_bad_input_has_its_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("good")
    with pytest.raises(DataError, match=rf"no file matches 'nothing/\*\.txt' \(looked from {tmp_path}\)"):
        read("good.txt", "nothing/*.txt")
    with pytest.raises(DataError, match=r"it is a folder; add /\*\*/\*\.txt"):
        read(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"bad\.txt is not UTF-8 \(byte 3: 0xe9\); convert it"):
        read("*.txt")
    (tmp_path / "bad.txt").unlink()
    assert DataError.exit_code == 65


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has a file that nobody can read from its start")
def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"broken\.txt cannot be read \(Input/output error\); mend it, or leave it out"):
        read(tmp_path / "*.txt")


def test_a_file_that_changes_after_it_was_hashed_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("before")
    [document] = read(tmp_path / "x.txt")
    (tmp_path / "x.txt").write_text("behind")
    with pytest.raises(DataError, match="changed while it was being prepared; run the same command again"):
        document.text()


def test_the_standard_library_is_python_text_without_tests_and_packages():
    found = documents({"source": "python-stdlib", "files": []})
    assert len(found) > 300 and sum(document.size for document in found) > 5_000_000
    assert {"os.py", "json/decoder.py"} <= {document.name for document in found}
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert not any(skipped & set(Path(document.name).parts) for document in found)
    assert all(document.name.endswith(".py") for document in found)
    assert all(str(document.path).startswith(sysconfig.get_path("stdlib")) for document in found)
    assert describe({"source": "python-stdlib"})["licence"] == "PSF-2.0"
