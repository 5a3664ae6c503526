"""Text from S3 and over HTTP: the key and the bytes of a local folder, in spite of faults, and no more requests than needed."""

import bz2
import gzip
import json
import lzma
import os
from types import SimpleNamespace

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.corpus import Corpus
from infini_llama.tasks.preprocess.sources import formats, huggingface, remote
from infini_llama.tasks.preprocess.sources.hub import Revision
from infini_llama.tasks.preprocess.sources.remote import RemoteFile, matching
from infini_llama.tasks.preprocess.stage import Preparation, preprocess
from infini_llama.tasks.preprocess.tokens import parts
from infini_llama.tasks.storage.artifacts import read_dataset
from support.remote import ConnectedFiles, WebServer, s3_server
from support.stages import survey
from support.texts import write_files, write_lines

TEXTS = [
    f"document {number}: größer, 日本語 " * (number % 40 + 1) for number in range(900)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text in every format, in folders, compressed and not; and what is not text."""
    folder = tmp_path_factory.mktemp("text") / "text"
    lines = [
        (json.dumps({"id": n, "text": text}) + "\n").encode()
        for n, text in enumerate(TEXTS)
    ]
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.txt").write_text("\ufeff" + TEXTS[0])
    (folder / ".hidden.txt").write_text("not read")
    (folder / "deep" / "b.jsonl").write_bytes(b"".join(lines[:200]))
    (folder / "deep" / "c.jsonl.gz").write_bytes(
        gzip.compress(b"".join(lines[200:300]), mtime=0)
    )
    (folder / "deep" / "er" / "d.jsonl.bz2").write_bytes(
        b"".join(bz2.compress(line) for line in lines[300:310])
    )
    (folder / "deep" / "er" / "e.txt.xz").write_bytes(
        lzma.compress(TEXTS[311].encode())
    )
    with pa.CompressedOutputStream(str(folder / "f.jsonl.zst"), "zstd") as file:
        file.write(b"".join(lines[320:400]))
    rows = [{"id": n, "text": text} for n, text in enumerate(TEXTS[400:800])]
    pq.write_table(pa.Table.from_pylist(rows), folder / "g.parquet", row_group_size=100)
    table = pd.DataFrame(
        {"text": [f"{text}\n{text}" for text in TEXTS[800:]], "label": 1}
    )
    table.to_csv(folder / "h.tsv", sep="\t", index=False)
    return folder


@pytest.fixture(scope="module")
def s3(folder):
    with s3_server() as files:
        files.mkdir("texts")
        files.put(str(folder) + "/", "texts/some/where/", recursive=True)
        yield "s3://texts/some/where"


@pytest.fixture
def web(folder, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    with WebServer(folder.parent) as server:
        yield server


PATTERNS = ["{}/", "{}/**/*", "{}/deep/*.jsonl*", "{}/a.txt", "{}/[fg]*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_text_elsewhere_has_the_same_key(folder, s3, web, pattern):
    found = {}
    for place in (str(folder), s3, f"{web.url}/text"):
        corpus = survey(DataConfig(files=[pattern.format(place)]))
        found[place] = corpus.identity, corpus.report.records
    here, *elsewhere = found.values()
    assert here[1] and elsewhere == [here, here]


def test_the_same_bytes_from_s3_and_over_http_with_faults(
    data, digests, folder, s3, web, tmp_path
):
    here = preprocess(data(files=[f"{folder}/**/*"], num_workers=2), tmp_path / "here")
    expected = digests(tmp_path / "here" / "datasets")
    assert (
        preprocess(data(files=[f"{s3}/**/*"], num_workers=2), tmp_path / "s3") == here
    )
    assert digests(tmp_path / "s3" / "datasets") == expected
    web.faults = ["503", "cut", "slow", "cut", "503", "slow"] * 3
    assert (
        preprocess(
            data(files=[f"{web.url}/text/**/*"], num_workers=2), tmp_path / "web"
        )
        == here
    )
    assert digests(tmp_path / "web" / "datasets") == expected and not web.faults


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_an_unreachable_server_is_not_bad_input(web, fault, monkeypatch):
    monkeypatch.setattr(remote, "TRIES", 2)
    web.faults = [fault] * 1000
    with pytest.raises(PipelineError) as raised:
        survey(
            DataConfig(
                files=[f"{web.url}/text/deep/b.jsonl?signature=hush"],
                on_bad_input="skip",
            )
        )
    assert raised.value.exit_code == 70 and "hush" not in str(raised.value)


def test_a_file_that_is_not_there_or_may_not_be_read_is_named(web, s3):
    for pattern in (
        f"{web.url}/text/none.txt",
        f"{s3}/none*",
        "s3://no-such-bucket/x.txt",
    ):
        with pytest.raises(DataError):
            survey(DataConfig(files=[pattern]))
    web.always = "403"
    with pytest.raises(DataError):
        survey(DataConfig(files=[f"{web.url}/text/a.txt"]))
    with pytest.raises(ConfigError):
        survey(DataConfig(files=["nonsense://bucket/x.txt"]))


def test_a_bucket_without_credentials_is_refused_at_the_first_try(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(remote, "PAUSE", 1000)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(DataError, match="set the credentials"):
        survey(DataConfig(files=["s3://texts/a-folder-not-listed-before/x.txt"]))
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl", "*/x&y*"])
def test_names_that_html_escapes_are_read(tmp_path, pattern):
    folder = tmp_path / "pages" / "a&b"
    folder.mkdir(parents=True)
    write_lines(folder / "x&y'z&copy.jsonl", ["one text", "another text"])
    with WebServer(tmp_path) as server:
        corpus = survey(DataConfig(files=[f"{server.url}/pages/{pattern}"]))
    here = survey(DataConfig(files=[f"{tmp_path}/pages/{pattern}"]))
    assert here.report.records == 2
    assert (corpus.identity, corpus.report) == (here.identity, here.report)


def test_a_compressed_file_that_its_server_has_unpacked_is_not_called_damaged(
    folder, web
):
    url = f"{web.url}/text/deep/c.jsonl.gz"
    assert survey(DataConfig(files=[url])).report.records == 100
    web.content_encoding = "gzip"
    with pytest.raises(
        DataError, match=r"c\.jsonl\.gz arrives without the compression .* download it"
    ) as raised:
        survey(DataConfig(files=[url]))
    assert "damaged" not in str(raised.value)
    web.content_encoding = ""
    broken = web.root / "broken.jsonl.gz"
    broken.write_bytes((folder / "deep" / "c.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(DataError, match="is damaged"):
        survey(DataConfig(files=[f"{web.url}/broken.jsonl.gz"]))


@pytest.mark.parametrize("after", ["#frag", "#b/c.csv", "?key=hush#frag"])
def test_a_name_is_that_of_the_path_of_a_url(folder, web, after):
    url = f"{web.url}/text/deep/b.jsonl"
    corpus = survey(DataConfig(files=[url + after]))
    here = survey(DataConfig(files=[str(folder / "deep" / "b.jsonl")]))
    assert (corpus.identity, corpus.names) == (here.identity, here.names)
    _, [(file, name)] = matching(url + after)
    assert (file.name, name, str(file)) == ("b.jsonl", "b.jsonl", url)


@pytest.mark.parametrize("pattern", ["dead/", "dead/*.txt"])
def test_a_link_to_a_file_that_the_server_does_not_have_is_named(tmp_path, pattern):
    write_files(tmp_path / "dead", ["one text"])
    (tmp_path / "dead" / "none.txt").symlink_to("nowhere")
    with WebServer(tmp_path) as server:
        url = server.url.replace("//", "//me:hush@")
        sources = [{"name": "one", "files": [f"{url}/{pattern}"]}]
        with pytest.raises(
            DataError, match=r"data\.sources\.one\.files: .*/dead/none\.txt, which"
        ) as raised:
            survey(DataConfig(sources=sources))
    assert "hush" not in str(raised.value)


@pytest.fixture
def connected(folder, monkeypatch) -> str:
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setattr(ConnectedFiles, "refusals", 0)
    fsspec.register_implementation("connected", ConnectedFiles, clobber=True)
    ConnectedFiles("server").put(f"{folder}/", "/text/", recursive=True)
    return "connected://me:hush@server/text"


@pytest.mark.parametrize("pattern", ["{}/", "{}/deep/*.jsonl*", "{}/a.txt"])
def test_a_filesystem_that_connects_when_it_is_opened_is_tried_again(
    folder, connected, pattern
):
    here = survey(DataConfig(files=[pattern.format(folder)])).identity
    ConnectedFiles.refusals = remote.TRIES - 1
    assert (
        survey(DataConfig(files=[pattern.format(connected)])).identity == here
        and not ConnectedFiles.refusals
    )


def test_a_server_that_refuses_every_connection_is_named_without_the_password(
    connected,
):
    ConnectedFiles.refusals = 1000
    with pytest.raises(
        PipelineError, match=r"connected://me:\*\*\*@server/text/a\.txt"
    ) as raised:
        survey(DataConfig(files=[f"{connected}/a.txt"]))
    assert (
        raised.value.exit_code == 70 and ConnectedFiles.refusals == 1000 - remote.TRIES
    )
    ConnectedFiles.refusals = 0
    with pytest.raises(DataError) as missing:
        survey(DataConfig(files=[f"{connected}/none.txt"]))
    assert "hush" not in f"{raised.value}{missing.value}"


@pytest.mark.parametrize(
    "url",
    [
        "github://a",
        "dir://x",
        "zip:///none/a.zip",
        "data://x",
        "s3://",
        "http://[::1",
        "http://",
        "https://127.0.0.1:99999/x.txt",
    ],
)
def test_a_url_that_its_filesystem_does_not_take_is_a_mistake_of_the_configuration(url):
    with pytest.raises(ConfigError) as raised:
        survey(DataConfig(sources=[{"name": "one", "files": [url]}]))
    assert str(raised.value).startswith(f"data.sources.one.files: {url} ")


def test_a_pointer_elsewhere_is_refused(folder, web):
    pointer = folder / "deep" / ".pointer.jsonl"
    pointer.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5e' * 32}\nsize 9\n"
    )
    with pytest.raises(DataError, match=r"pointer\.jsonl is a Git LFS pointer"):
        survey(
            DataConfig(
                files=[f"{web.url}/text/deep/.pointer.jsonl"], on_bad_input="skip"
            )
        )


@pytest.mark.parametrize("content_type", ["text/html", "text/html; charset=utf-8"])
def test_what_a_server_calls_a_page_is_one_if_it_begins_with_a_tag(
    folder, web, content_type
):
    web.content_type = content_type
    place = folder.parent / "pages"
    place.mkdir(exist_ok=True)
    (place / "sign-in.txt").write_text("\n<div>You have to sign in.</div>\n")
    (place / "plain.txt").write_text("Some servers say so of every file.\n")
    (place / "page.html").write_text("<div>Text of its own.</div>\n")
    with pytest.raises(DataError, match=r"sign-in\.txt is a web page"):
        survey(DataConfig(files=[f"{web.url}/pages/sign-in.txt"]))
    for name in (
        "pages/plain.txt",
        "pages/page.html",
        "text/deep/b.jsonl",
        "text/g.parquet",
    ):
        assert survey(DataConfig(files=[f"{web.url}/{name}"])).documents
    assert survey(
        DataConfig(files=[f"{web.url}/pages/sign-in.txt"], format="txt")
    ).documents
    web.content_type = "text/plain"
    assert survey(DataConfig(files=[f"{web.url}/pages/sign-in.txt"])).documents


def test_a_server_without_ranges_is_copied_once_for_a_reading(folder, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK", 10_000)
    here = survey(DataConfig(files=[str(folder / "deep" / "b.jsonl")])).identity
    with WebServer(folder.parent, ranges=False) as server:
        assert (
            survey(DataConfig(files=[f"{server.url}/text/deep/b.jsonl"])).identity
            == here
        )
        assert server.requests["b.jsonl"] < 6


def test_unchanged_remote_text_is_not_read_again_and_changed_text_is(
    folder, tmp_path, web, monkeypatch
):
    copy = folder.parent / "copy"
    write_files(copy, (f"text number {number}" for number in range(3)))

    def look():
        web.sent.clear()
        corpus = Corpus(DataConfig(files=[f"{web.url}/copy/*"]), tmp_path / "home")
        corpus.read()
        return corpus.units_by_source(), sorted(
            name for name in web.sent if name.endswith(".txt")
        )

    monkeypatch.setattr(parts, "RUN_BYTES", 1)  # each file is a part
    first = look()
    assert first[1] == ["0.txt", "1.txt", "2.txt"] and look() == (first[0], [])
    (copy / "1.txt").write_text("text NUMBER 1")
    (copy / "3.txt").write_text("text number 3")
    assert look()[1] == ["1.txt", "3.txt"] and look()[1] == []


def test_text_that_changes_on_a_web_server_after_its_listing_is_refused(
    tmp_path, web, monkeypatch
):
    copy = web.root / "changing"
    write_files(copy, ("text number 0", "text number 1"))
    monkeypatch.setattr(parts, "RUN_BYTES", 1)  # each file is a part
    settings = DataConfig(files=[f"{web.url}/changing/*"])
    corpus = Corpus(settings, tmp_path)
    (copy / "1.txt").write_text("text NUMBER 1")
    web.requests.clear()
    with pytest.raises(DataError, match=r"1\.txt changed or was removed while"):
        corpus.read()
    assert web.requests["0.txt"] == 2  # its content, and its ETag after that
    web.sent.clear()
    Corpus(settings, tmp_path).read()
    assert web.sent["0.txt"] == 0
    assert web.sent["1.txt"] == len("text NUMBER 1")


@pytest.mark.parametrize("pattern", ["{}/*", "{}/a.txt"])
def test_text_that_changes_on_s3_after_its_listing_is_refused(s3, tmp_path, pattern):
    # The listing is in a cache of the filesystem that reads, and not in one of this.
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    folder = "s3://texts/changing"
    files.pipe(f"{folder}/a.txt", b"text number 0")
    corpus = Corpus(DataConfig(files=[pattern.format(folder)]), tmp_path)
    files.pipe(f"{folder}/a.txt", b"text NUMBER 0")
    with pytest.raises(DataError, match=r"a\.txt changed or was removed while"):
        corpus.read()
    Corpus(DataConfig(files=[pattern.format(folder)]), tmp_path).read()


def test_only_content_that_the_server_states_shows_a_change(connected, monkeypatch):
    url = f"{connected}/a.txt"
    facts: dict[str, object] = {"size": 3}
    monkeypatch.setattr(ConnectedFiles, "info", lambda files, path: facts)
    listed = RemoteFile(url, 3, (3, "one"))
    without_stamp = RemoteFile(url, 3, None)
    assert not listed.has_changed()
    facts["etag"] = '"one"'  # Azure has no quotes in a listing
    assert not listed.has_changed()
    facts["etag"] = '"two"'
    assert listed.has_changed()
    assert not without_stamp.has_changed()


def test_a_file_that_could_not_be_read_is_read_once_access_is_granted(
    folder, tmp_path, web, data, monkeypatch
):
    monkeypatch.setattr(parts, "RUN_BYTES", 1)  # each file is a part
    write_files(
        folder.parent / "granted", (f"words of text {n} " * 40 for n in range(4))
    )
    settings = data(files=[f"{web.url}/granted/*"], on_bad_input="skip")
    web.faults = ["403"]
    before = preprocess(settings, tmp_path)
    web.faults = ["403"]
    assert changed(preprocess(settings, tmp_path), built=[]) == changed(
        before, built=[]
    )
    after = preprocess(settings, tmp_path)
    assert (before.text.left_out.bad_files, after.text.left_out.bad_files) == (1, 0)
    assert after == changed(preprocess(settings, tmp_path), built=after.built)


def test_a_row_group_in_the_middle_costs_itself(tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK", 4096)
    texts = [os.urandom(500).hex() for _ in range(2000)]
    table = pa.table({"text": texts, "other": [os.urandom(500) for _ in texts]})
    pq.write_table(
        table,
        web.root / "rows.parquet",
        row_group_size=100,
        compression="none",
        use_dictionary=False,
    )
    _, [(file, _)] = matching(f"{web.url}/rows.parquet")
    web.sent.clear()
    assert [text for batch in formats.read(file, "text") for text in batch] == texts
    # The column, and not the other.
    assert web.sent["rows.parquet"] < 2.2e6 + 20 * 3 * 4096
    spans = formats.spans(file, file.size or 0, "auto", 150_000)
    assert spans is not None and len(spans) == 20
    web.sent.clear()
    assert [
        text
        for batch in formats.read(file, "text", "auto", spans[10])
        for text in batch
    ] == texts[1000:1100]
    assert web.sent["rows.parquet"] < 300_000


def test_the_hub_commit_is_recorded_in_the_manifest(data, tmp_path, monkeypatch):
    commit, read = "0123456789" * 4, []
    monkeypatch.setattr(
        huggingface, "revision_of", lambda dataset, revision: Revision(commit)
    )
    nothing = SimpleNamespace(config=SimpleNamespace(data_files=None))
    monkeypatch.setattr(huggingface.HuggingFace, "_builder", lambda source: nothing)
    monkeypatch.setattr(
        huggingface.Split,
        "batches",
        lambda split, span=None: (read.append(split), iter([TEXTS]))[1],
    )
    given = {
        "source": "huggingface",
        "dataset": "someone/something",
        "files": [],
        "streaming": True,
    }
    reference = preprocess(data(**given), tmp_path)
    assert (
        read_dataset(tmp_path / reference.path).meta.provenance.sources[0].facts
        == {"revision": commit}
        and read[0].revision.commit == commit
    )
    before = len(read)
    assert (
        Preparation(data(**given), tmp_path).lookup() == changed(reference, built=[])
        and len(read) == before
    )
