import os
import sysconfig
from pathlib import Path

import pytest

from infini_llama.configs.errors import DataError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.text_formats import TEXT_FORMATS
from infini_llama.tasks.preprocess.corpus import Corpus
from infini_llama.tasks.preprocess.sources import formats, huggingface
from infini_llama.tasks.preprocess.sources.hub import Revision
from infini_llama.tasks.preprocess.sources.huggingface import Split
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.sources import describe, source_of
from infini_llama.tasks.preprocess.tokens import parts
from support.stages import Survey, survey


def read(*files: object) -> Survey:
    return survey(
        DataConfig(files=[str(file) for file in files], validation_fraction=1e-9)
    )


def names(*files: object) -> list[str]:
    return read(*files).names


def test_documents_are_in_the_order_of_names_from_the_first_wildcard(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("b/2.txt", "zwei ü"), ("a.txt", "one"), ("c.md", "no")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = read(tmp_path / "**/*.txt")
    assert found.names == ["a.txt", "b/2.txt"] and found.train == ["one", "zwei ü"]


def test_names_do_not_depend_on_where_the_text_lies_or_how_it_is_called(
    tmp_path, monkeypatch
):
    for place in ("here", "there/deep"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "x.txt").write_text("same")
    found = [names(tmp_path / place / "**/*.txt") for place in ("here", "there/deep")]
    monkeypatch.chdir(tmp_path / "here")
    found.append(names("**/*.txt"))
    assert found[0] == found[1] == found[2]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/here/**/*.txt") == ["sub/x.txt"]


def test_a_file_that_several_patterns_match_is_one_document(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "link.txt").symlink_to("x.txt")
    assert read(tmp_path / "*.txt", tmp_path / "x.txt", tmp_path / "**/*").train == [
        "x"
    ]


def test_patterns_of_hidden_files_and_of_names_with_brackets(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in (".git/x.txt", ".hidden.txt", "a[1].txt"):
        (tmp_path / name).write_text(name)
    assert names(tmp_path / "**/*.txt") == ["a[1].txt"]
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]
    assert names(tmp_path / ".*.txt") == [".hidden.txt"]


def test_folders_of_the_system_on_a_disk_of_its_own_are_no_text(tmp_path):
    for name in ("lost+found/#123.txt", "$RECYCLE.BIN/deleted.txt", "mine/x.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    assert names(tmp_path) == names(tmp_path / "**/*.txt") == ["mine/x.txt"]


def test_a_file_that_is_removed_or_changed_after_it_was_listed_is_named(tmp_path):
    for change in (
        Path.unlink,
        lambda file: file.write_text("longer than before"),
        lambda file: os.utime(file, (1, 1)),
    ):
        (tmp_path / "a.txt").write_text("text")
        corpus = Corpus(DataConfig(files=[str(tmp_path / "a.txt")]), tmp_path / "home")
        change(tmp_path / "a.txt")
        with pytest.raises(DataError, match=r"a\.txt"):
            corpus.read()


@pytest.mark.skipif(
    not Path("/proc/self/mem").exists(),
    reason="Linux has a file that nobody can read from its start",
)
def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"broken\.txt .*Input/output error"):
        read(tmp_path / "*.txt")


def test_a_pipe_or_device_is_named_as_one(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", Path("/dev/null")):
        with pytest.raises(DataError, match=rf"'{path}' is a pipe, device or socket"):
            read(path)


def test_the_standard_library_is_python_text_without_tests_and_packages(tmp_path):
    inputs = source_of(DataConfig(source="python-stdlib")).inputs(
        NotText(tmp_path / "home")
    )
    training = inputs.training
    assert (
        not inputs.validation and sum(source.size() for source in training) > 5_000_000
    )
    found = {source.name for source in training}
    assert (
        len(found) > 300
        and {"os.py", "json/decoder.py"} <= found
        and all(name.endswith(".py") for name in found)
    )
    skipped = {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
    }
    assert not any(skipped & set(Path(name).parts) for name in found)
    assert all(
        str(source.path).startswith(sysconfig.get_path("stdlib")) for source in training
    )
    assert describe(DataConfig(source="python-stdlib")).license == "PSF-2.0"


def test_text_is_read_again_where_its_file_is_read_in_another_way(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(parts, "SETTLED", -(10**12))  # as if the file were old
    (tmp_path / "x.log").write_text("a\n")
    data = DataConfig(files=[str(tmp_path / "x.log")])
    Corpus(data, tmp_path / "home").read()
    assert Corpus(data, tmp_path / "home").recall()
    for name, value in (
        ("READER_VERSION", 0),
        ("BY_ENDING", formats.BY_ENDING | {"log": TEXT_FORMATS["csv"]}),
        ("COMPRESSED", ("log",)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(formats, name, value)
            assert not Corpus(data, tmp_path / "home").recall(), name
    assert not Corpus(changed(data, format="jsonl"), tmp_path / "home").recall()


def test_a_page_is_a_text_by_its_format_alone_whatever_was_read_before(
    tmp_path, monkeypatch
):
    """The message about a page that is left out says so."""
    monkeypatch.setattr(parts, "SETTLED", -(10**12))  # as if the file were old
    (tmp_path / "page.txt").write_text("<!doctype html><p>words</p>")
    left_out = DataConfig(files=[str(tmp_path / "page.txt")], on_bad_input="skip")
    read = changed(left_out, format="txt")
    for data, documents in ((left_out, 0), (read, 1), (left_out, 0)):
        corpus = Corpus(data, tmp_path / "home")
        corpus.read()
        (report,) = corpus.reports.values()
        assert (report.records, report.bad_files) == (documents, 1 - documents)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_that_datasets_would_copy_is_listed_without_opening_it(
    monkeypatch, streaming
):
    monkeypatch.setattr(
        huggingface, "_opened", lambda split: pytest.fail("it was opened")
    )
    split = Split("someone/some", None, "train", Revision("5e" * 20), streaming, "text")
    assert split.spans(1) is None and split.stamp() == ("5e" * 20,)
