"""loss_on: answer, from the text to the labels; and the filler of passkeys from files."""

import errno
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.corpus import Corpus, listed
from infini_llama.tasks.preprocess.sources import passkey
from infini_llama.tasks.preprocess.sources.files import File
from infini_llama.tasks.preprocess.sources.passkey import HEAD, HIDDEN, QUESTION
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.sources import source_of
from infini_llama.tasks.preprocess.stage import Preparation, preprocess
from infini_llama.tasks.preprocess.tokens import parts
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import (
    map_shard,
    map_targets,
    unpack_targets,
)
from infini_llama.tasks.preprocess.tokens.stream import TokenStream
from infini_llama.tasks.preprocess.tokens.targets import AnswerTargets, encode_spans
from infini_llama.tasks.report.dataset import describe
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.tokenizers.encoder import reference
from infini_llama.tasks.verify_data.checks import verify
from support.texts import documents_of, write_files, write_lines
from support.tokenizer_kinds import of_kind

MARK = "\nAnswer: "
ANSWERS = {"loss_on": "answer", "answer_after": MARK}
STRATEGIES = [{"packing": name} for name in ("concat", "padded", "best_fit", "greedy")]
STRATEGIES += [{"packing": "window", "stride": 5}]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """Documents with prompts and answers of several lengths; some have the mark twice, one has no text behind it."""
    random = np.random.default_rng(0)
    words = ["green", "sky", "«größer»", "7 1 4", "\n"]

    def some(least: int) -> str:
        return " ".join(random.choice(words, size=random.integers(least, 12)))

    lines = [f"{number} {some(0)}{MARK}{some(1)}" for number in range(40)]
    lines += [
        f"{number} {some(1)}{MARK}{some(1)}{MARK}{some(1)}" for number in range(40, 60)
    ] + [f"60 empty{MARK}"]
    return write_lines(tmp_path_factory.mktemp("answers") / "texts.jsonl", lines)


def targets_of(shard: Path) -> np.ndarray:
    """Which tokens of a shard count, bool [tokens]."""
    return unpack_targets(map_targets(shard), 0, len(map_shard(shard)[1]))


def literal(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The stream of a split and whether each token is of an answer, from the decoded texts alone."""
    tokenizer, ids, answers = (
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        [],
        [],
    )
    for document in documents_of(folder, split):
        text = tokenizer.decode(document[:-1], skip_special_tokens=False)
        before, mark, after = text.rpartition(MARK)
        prompt, answer = (
            tokenizer.encode(part, add_special_tokens=False).ids
            for part in (before + mark, after)
        )
        ids += [*prompt, *answer, 0]
        answers += [False] * len(prompt) + [True] * (len(answer) + 1)
    return np.array(ids), np.array(answers)


@pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda strategy: strategy["packing"]
)
@pytest.mark.usefixtures("small_units")
def test_labels_that_count_are_last_answers_and_all_of_a_source_without_answers(
    data, texts, tmp_path, strategy
):
    lines = [
        f"{number} blue sky over green «fields»{MARK if number % 3 else ''} and more"
        for number in range(60)
    ]
    sources = [
        {"name": "answers", "files": [texts], **ANSWERS},
        {"name": "prose", "files": [write_lines(tmp_path / "prose.jsonl", lines)]},
    ]
    given = data(files=[], sources=sources, **strategy)
    reference = preprocess(given, tmp_path)
    verify(reference, tmp_path, "deep")
    folder = tmp_path / reference.path
    assert len(list((folder / "train").glob("*.arrow"))) > 3
    for split in ("train", "validation"):
        reader = TokenReader(folder, reference.row_table, split)
        ids, is_answer = literal(folder, split)
        shards = read_dataset(folder).content[split].shards
        answers = sum(shard.tokens for shard in shards if shard.source == "answers")
        stream = np.concatenate([map_shard(path)[1] for path in reader.stream.paths])
        assert stream[:answers].tolist() == ids[
            :answers
        ].tolist() and 0 < answers < len(stream)
        counts = np.concatenate(
            [is_answer[:answers], np.ones(len(stream) - answers, dtype=bool)]
        )
        rows = np.arange(len(reader))
        mask = reader.targets(rows)
        assert mask is not None
        of_answers = next(
            source.rows for source in reader.sources if source.name == "answers"
        )
        assert not mask[:of_answers].all()
        for row, targets in zip(rows.tolist(), mask, strict=True):
            expected = [
                label
                for start, size in reader.rows.pieces_of(row).tolist()
                for label in (False, *counts[start + 1 : start + size])
            ]
            assert targets.tolist() == (expected + [False] * (17 - len(expected)))[1:]
        assert reader.count_targets(rows) == int(mask.sum()) > 0
    assert {
        name: source.loss_on for name, source in describe(folder).sources.items()
    } == {
        "answers": "answer",
        "prose": "all",
    }
    shards = {
        shard.source: folder / shard.file
        for shard in read_dataset(folder).content.validation.shards
    }
    assert not targets_of(shards["answers"]).all() and targets_of(shards["prose"]).all()
    assert preprocess(given, tmp_path).built == ()


def test_other_answers_give_another_dataset_without_shared_shards(
    data, texts, tmp_path
):
    settings = [
        data(files=[texts]),
        data(files=[texts], **ANSWERS),
        data(files=[texts], **ANSWERS | {"answer_after": ":"}),
    ]
    assert len({Preparation(each, tmp_path).plan().key for each in settings}) == 3
    same_spans = data(files=[texts], **ANSWERS | {"answer_after": MARK.strip("\n")})
    of_answers = Preparation(settings[1], tmp_path).plan().key
    assert Preparation(same_spans, tmp_path).plan().key == of_answers
    for each in settings:
        folder = tmp_path / preprocess(each, tmp_path).path
        (shard, *_) = sorted((folder / "train").glob("*.arrow"))
        if each.loss_on == "all":
            with pytest.raises(DataError):
                map_targets(shard)
        else:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            (start, *_), values = map_shard(shard)
            prompt = values[start : start + targets_of(shard).argmax()]
            assert tokenizer.decode(prompt.tolist()).endswith(each.answer_after)


def test_shards_without_a_mask_are_refused_where_not_all_tokens_count(
    data, texts, tmp_path
):
    """As an earlier version wrote them: otherwise all tokens would count."""
    folder = tmp_path / preprocess(data(files=[texts]), tmp_path).path
    manifest = read_dataset(folder)
    of_answers = changed(manifest, content=changed(manifest.content, loss_on="answer"))
    stream = TokenStream(folder, of_answers, "train", verify_on_read=False)
    with pytest.raises(DataError, match="loss_mask"):
        stream.targets(0, 5)


def test_a_document_without_the_mark_is_refused_by_name(data, tmp_path):
    texts = [f"{number}{MARK}{number}" for number in range(30)]
    texts[17] = "no mark here"
    files = write_files(tmp_path / "text", texts)
    with pytest.raises(DataError, match=r"17\.txt .*answer_after"):
        preprocess(data(files=[files], **ANSWERS), tmp_path)


def answers_of(texts: list[bytes], mark: str) -> list[tuple[tuple[int, int], ...]]:
    file = File(Path("a.txt"), "a.txt", "text")
    return [AnswerTargets(mark).spans(text, file) for text in texts]


def byte_by_byte(batch: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """A token per byte, but one for `:)`."""
    each = [list(text.replace(b":)", b"\xff")) for text in batch]
    ids = np.array([token for ids in each for token in ids], np.uint16)
    return ids, np.cumsum([0, *map(len, each)])


def shown(text: bytes, spans: list[tuple[int, int]]) -> tuple[str, str]:
    """The tokens of a text, and a `+` for each that counts, its end's last."""
    found = encode_spans(byte_by_byte, [text], [spans])
    assert found.offsets.tolist() == [0, len(found.ids)]
    return bytes(found.ids.tolist()).decode("latin-1"), "".join(
        "-+"[int(bit)] for bit in found.targets
    )


@pytest.mark.parametrize(
    ("text", "spans", "tokens", "targets"),
    [
        (b"abc", [(0, 3)], "abc", "++++"),
        (b"abc", [], "abc", "----"),
        (b"abc", [(3, 3)], "abc", "---+"),
        (b"abc", [(0, 1)], "abc", "+---"),
        (b"a:b|c:de|f", [(2, 3), (6, 8)], "a:b|c:de|f", "--+---++---"),
        (b"a:b|c:de", [(2, 3), (6, 8)], "a:b|c:de", "--+---+++"),
        (b":)a:)", [(4, 5)], "\xffa:)", "---++"),  # a token would reach across a bound
        (b":)a:)b:", [(2, 3), (5, 6)], "\xffa\xffb:", "-+-+--"),
        (b":)a:)b:)", [(2, 3), (5, 6), (7, 8)], "\xffa\xffb:)", "-+-+-++"),
    ],
)
def test_targets_are_the_tokens_of_the_spans(text, spans, tokens, targets):
    assert shown(text, spans) == (tokens, targets)


def test_documents_are_joined_in_their_order():
    texts = [b"a:bc", b"d:e:f", b"xyz"]
    found = encode_spans(byte_by_byte, texts, [*answers_of(texts[:2], ":"), ((1, 2),)])
    assert bytes(found.ids.tolist()) == b"".join(texts)
    assert found.offsets.tolist() == [0, 4, 9, 12]
    assert found.targets.tolist() == [bit == "+" for bit in "--+++----++-+--"]


@pytest.mark.parametrize("kind", ["llama2", "mistral", "byte-level bpe"])
def test_the_tokens_of_an_answer_are_those_of_the_whole_text(kind):
    tokenizer = of_kind(kind)

    def encode(batch: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        each = [
            tokenizer.encode(text.decode(), add_special_tokens=False).ids
            for text in batch
        ]
        return np.concatenate(each), np.cumsum([0, *map(len, each)])

    texts = [b"two and two: 4", b"a question: an answer"]
    found = encode_spans(encode, texts, answers_of(texts, ":"))
    whole = encode(texts)
    assert (
        found.ids.tolist() == whole[0].tolist()
        and found.offsets.tolist() == whole[1].tolist()
    )
    sizes = np.diff(encode([text[: text.index(b":") + 1] for text in texts])[1])
    lengths = np.diff(found.offsets)
    expected = [
        bit
        for prompt, length in zip(sizes, lengths, strict=True)
        for bit in [False] * prompt + [True] * (length - prompt + 1)
    ]
    assert found.targets.tolist() == expected


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("llama2", [" river value", " river"]),
        ("mistral", [" river value", " river"]),
        ("gemma", ["river value", "river"]),
        ("byte-level bpe", ["river value", "river"]),
    ],
)
def test_an_answer_that_begins_within_a_token_has_no_space_of_its_own(kind, answers):
    tokenizer = of_kind(kind)
    texts = [b"It was the: river value", "größer: it was: river".encode()]
    found = encode_spans(
        reference(tokenizer), texts, answers_of(texts, ": "), tokenizer
    )
    for number, text in enumerate(texts):
        first, last = found.offsets[number : number + 2]
        ids = found.ids[first:last]
        assert (
            tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text.decode()
        )
        counts = found.targets[first + number : last + number + 1]
        assert counts[-1]
        pieces = [tokenizer.id_to_token(token) for token in ids[counts[:-1]].tolist()]
        answer = "".join(pieces).replace("▁", " ").replace("Ġ", " ")
        assert answer == answers[number]
        if kind in ("llama2", "mistral"):
            assert ids.tolist() == tokenizer.encode(text.decode()).ids


def test_a_token_across_the_end_of_a_span_belongs_to_what_follows():
    tokenizer = of_kind("llama2")
    text = b"It was the: river value"
    spans = [[(0, text.index(b" river"))], [(0, text.index(b"river"))]]
    found = encode_spans(reference(tokenizer), [text, text], spans, tokenizer)
    same, bound_within_token = np.split(found.targets, 2)
    assert same.tolist() == bound_within_token.tolist()
    assert found.ids.tolist() == tokenizer.encode(text.decode()).ids * 2


def test_a_dataset_with_answers_has_the_text_as_it_is(data, tmp_path):
    of_kind("llama2").save(str(tmp_path / "tokenizer.json"))
    lines = [f"It was the {number}: river value" for number in range(40)]
    given = data(
        files=[write_lines(tmp_path / "texts.jsonl", lines)],
        tokenizer={"path": str(tmp_path / "tokenizer.json")},
        loss_on="answer",
        answer_after=": ",
    )
    folder = tmp_path / preprocess(given, tmp_path).path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = [*documents_of(folder, "train"), *documents_of(folder, "validation")]
    assert {tokenizer.decode(document[:-1]) for document in documents} == set(lines)


def filler_of(settings):
    """The text that filler is cut from."""
    (source,) = source_of(settings).inputs(NotText(Path("home"))).training
    return "".join(source._filler_words())


def test_filler_is_drawn_from_all_files_alike(data, tmp_path, monkeypatch):
    monkeypatch.setattr(passkey, "FILLER_CHARACTERS", 10_000)
    monkeypatch.setattr(passkey, "LEAST_OF_FILE", 1_000)
    settings = data(
        source="passkey", files=[str(tmp_path / "*.txt")], passkey={"filler": "files"}
    )
    (tmp_path / "0.txt").write_text("a\n\n  b" * 10_000)
    (tmp_path / "1.txt").write_text("c " * 250)
    (tmp_path / "2.txt").write_text("d\t" * 20_000)
    text = filler_of(settings)
    assert [text.count(letter) for letter in "cd"] == [250, 4_750 // 2]
    assert abs(text.count("b") - 4_750 // 6) <= 1 and "a\n\n  b" in text
    for number in range(3, 60):
        (tmp_path / f"{number}.txt").write_text(f"{chr(200 + number)}\n" * 5_000)
    text = filler_of(settings)
    kinds = {letter for letter in text if letter > "\x7f"}
    assert 6 <= len(kinds) <= 10 and all(text.count(kind) == 500 for kind in kinds)
    first_by_name = sorted(map(str, range(3, 60)))[:12]
    assert not {str(ord(kind) - 200) for kind in kinds} <= set(first_by_name)
    assert text == filler_of(settings)


def test_filler_has_no_document_that_is_held_out(data, tmp_path):
    lines = [f"line{number} of many" for number in range(200)]
    write_lines(tmp_path / "a.jsonl", lines)
    (tmp_path / "b.txt").write_text("text of one document " * 50)
    files = [str(tmp_path / "*")]
    sources = [
        {"name": "text", "files": files, "weight": 0.5},
        {
            "name": "made",
            "source": "passkey",
            "files": files,
            "weight": 0.5,
            "passkey": {"documents": 40, "repetitions": 9, "filler": "files"},
        },
    ]
    settings = data(sources=sources, files=[], validation_fraction=0.2)
    reference = preprocess(settings, tmp_path / "home")
    folder = tmp_path / "home" / reference.path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = documents_of(folder, "validation")
    held_out = {tokenizer.decode(document) for document in documents} & set(lines)
    assert 20 < len(held_out) < 60
    listed_sources = {
        source.name: source for source in listed(settings, NotText(tmp_path / "home"))
    }
    (part,) = listed_sources["made"].training
    words = "".join(part.files[0]._filler_words()).split()
    assert set(words) & {line.split()[0] for line in lines} == {
        line.split()[0] for line in set(lines) - held_out
    }


def text_and_keys(text, filler):
    """Two sources: text, and generated texts with filler of these files, which come first."""
    keys = {
        "name": "keys",
        "source": "passkey",
        "files": filler,
        "passkey": {"documents": 40, "repetitions": 9, "filler": "files"},
    }
    return [keys, {"name": "text", "files": text[:1], "validation_files": text[1:]}]


def training_text(home, reference):
    folder = home / reference.path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = documents_of(folder, "train")
    return "".join(tokenizer.decode(document) for document in documents)


def test_filler_has_no_words_of_validation_files_of_another_source(
    data, tmp_path, monkeypatch
):
    monkeypatch.setattr(parts, "SETTLED", -(10**12))  # the files are new
    texts = tmp_path / "texts"
    write_files(texts, [f"open{number} words " * 60 for number in range(9)])
    held = texts / "held.txt"
    held.write_text("secret sentence " * 300)
    link = tmp_path / "link"
    link.symlink_to(texts)
    home = tmp_path / "home"
    filler = [f"{link}/*.txt"]
    sources = text_and_keys([f"{texts}/*.txt"], filler)
    before = preprocess(data(files=[], sources=sources), home)
    assert "secret" in training_text(home, before)

    sources = text_and_keys([f"{texts}/*.txt", str(held)], filler)
    reference = preprocess(data(files=[], sources=sources), home)
    trained = training_text(home, reference)
    assert "secret" not in trained and "The pass key is" in trained

    sources = text_and_keys([f"{texts}/*.txt", str(held)], [f"{link}/held.txt"])
    with pytest.raises(DataError, match="passkey has no filler"):
        preprocess(data(files=[], sources=sources), home)


def test_validation_files_that_are_no_filler_do_not_change_the_generated_texts(
    data, tmp_path
):
    pattern = write_files(tmp_path / "texts", [f"open{n} " * 60 for n in range(9)])
    held = write_files(tmp_path / "held", ["secret sentence " * 300])
    keys = []
    for text in ([pattern], [pattern, held]):
        settings = data(files=[], sources=text_and_keys(text, [pattern]))
        corpus = Corpus(settings, tmp_path / "home")
        corpus.read()
        assert corpus.sources[0].name == "keys"
        keys.append((corpus.sources[0].training[0].stamps, corpus.units_by_source()[0]))
    assert keys[0] == keys[1]


def bad_filler(folder):
    """Filler of good files, one with a bad record, one that is damaged near its end."""
    folder.mkdir()
    lines = [f'{{"text": "good{number} words"}}\n' for number in range(400)]
    lines[200] = '{"text": 7}\n'
    (folder / "records.jsonl").write_text("".join(lines))
    (folder / "damaged.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "torn words"}\n' * 10**5)[:-9]
    )
    return [f"{folder}/*"]


def test_bad_filler_is_skipped_and_counted(data, tmp_path):
    pattern = write_files(tmp_path / "texts", [f"open{n} " * 60 for n in range(9)])
    filler = bad_filler(tmp_path / "filler")
    sources = text_and_keys([pattern], filler)
    home = tmp_path / "home"
    settings = data(files=[], sources=sources, on_bad_input="skip")
    reference = preprocess(settings, home)
    trained = training_text(home, reference)
    assert "good1 " in trained and "good399 " in trained and "torn" not in trained
    left_out = reference.text.left_out
    assert (left_out.bad_records, left_out.bad_files) == (2, 0)
    named = sorted(left_out.bad)
    assert re.search(r"passkey takes its filler from .*damaged\.jsonl\.gz", named[0])
    assert re.search(r"records\.jsonl, which has int instead of text", named[1])


@pytest.mark.parametrize("name", ["records.jsonl", "damaged.jsonl.gz"])
def test_bad_filler_ends_the_build_unless_it_is_to_be_skipped(data, tmp_path, name):
    bad_filler(tmp_path / "filler")
    settings = data(
        source="passkey",
        files=[f"{tmp_path}/filler/{name}"],
        passkey={"filler": "files"},
    )
    fault = rf"^passkey takes its filler from .*{re.escape(name)}, which .*; repair it"
    with pytest.raises(DataError, match=fault):
        preprocess(settings, tmp_path / "home")


def test_filler_that_could_not_be_read_is_read_again(data, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SETTLED", -(10**12))  # the files are new
    pattern = write_files(
        tmp_path / "texts", ["first words " * 60, "second text " * 60]
    )
    settings = data(
        source="passkey",
        files=[pattern],
        passkey={"documents": 40, "repetitions": 9, "filler": "files"},
        on_bad_input="skip",
    )
    home = tmp_path / "home"
    batches = File.batches

    def refuse_first(file, span=None):
        if file.name == "0.txt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return batches(file, span)

    with monkeypatch.context() as patch:
        patch.setattr(File, "batches", refuse_first)
        reference = preprocess(settings, home)
    trained = training_text(home, reference)
    assert "second text" in trained and "first words" not in trained
    (bad,) = reference.text.left_out.bad
    assert bad.endswith("0.txt, which cannot be read (Permission denied)")
    reference = preprocess(settings, home)
    assert "first words" in training_text(home, reference)
    assert reference.text.left_out.bad == ()


def test_filler_that_changes_while_it_is_read_is_refused(data, tmp_path, monkeypatch):
    filler = tmp_path / "0.txt"
    filler.write_text("first words " * 9)
    settings = data(source="passkey", files=[str(filler)], passkey={"filler": "files"})
    batches = File.batches

    def change_after(file, span=None):
        yield from batches(file, span)
        filler.write_text("other words " * 9)

    monkeypatch.setattr(File, "batches", change_after)
    with pytest.raises(DataError, match="changed or was removed while"):
        preprocess(settings, tmp_path / "home")


def test_filler_can_be_words_of_files(data, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SETTLED", -(10**12))  # the files are new
    prose = [f"word{number}" for number in range(200)]
    settings = data(
        source="passkey",
        files=[write_files(tmp_path, ("\n".join(prose[:90]), "\n".join(prose[90:])))],
        passkey={"documents": 30, "repetitions": 20, "filler": "files"},
        loss_on="answer",
        answer_after=QUESTION,
    )
    (source,) = source_of(settings).inputs(NotText(tmp_path / "home")).training
    texts = [text for text in source.records() if isinstance(text, str)]
    joined, starts = " ".join(prose * 3), set[str]()
    for text in texts:
        key = text[-6:-1]
        before, hidden, rest = text[len(HEAD) : -len(f"{QUESTION} {key}.")].partition(
            HIDDEN.format(key=key)
        )
        assert hidden and " ".join((before + rest).split()) in joined
        spaces = re.findall(r"\s+", before + rest)
        assert (
            set(spaces) <= {"\n", " "} and spaces.count(" ") <= 2 * len(spaces) / 90 + 2
        ), "lines stay lines; files, not words, are joined by spaces"
        starts.add((before + rest).split(maxsplit=1)[0] if before + rest else "")
    assert len(texts) == 30 and len(starts) > 15
    digest = preprocess(settings, tmp_path / "home").digest
    known = Preparation(settings, tmp_path / "home").lookup()
    assert (
        known and preprocess(settings, tmp_path / "home") == known and known.built == ()
    )
    (tmp_path / "1.txt").write_text("other " * 90)
    assert Preparation(settings, tmp_path / "home").lookup() is None
    assert preprocess(settings, tmp_path / "home").digest != digest
    (tmp_path / "1.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"1\.txt"):
        preprocess(settings, tmp_path / "home")
