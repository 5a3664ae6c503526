"""The hidden number: where it stands, that pieces read it as one pass would, and that the answer is what greedy writing gives."""

import json
import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema.sources import PasskeyConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.evaluate import passkey as module
from infini_llama.tasks.evaluate.passkey import (
    BOUNDARIES_AFTER,
    HiddenFacts,
    ask,
    ask_across,
    begin,
    controls,
    last_mention,
    passkey,
    passkey_after,
    right_tokens,
)
from infini_llama.tasks.evaluate.stage import (
    filler_tokens,
    find_passkeys,
    find_passkeys_across,
    find_passkeys_after,
    rows_of_text,
    verified_reader,
)
from infini_llama.tasks.preprocess.sources.passkey import (
    FILLER,
    FORMS,
    HEAD,
    HIDDEN,
    QUESTION,
    SENTENCES,
    passkey_texts,
    sentences,
)
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.sources import source_of
from infini_llama.tasks.preprocess.sources.texts import LONGEST_DOCUMENT
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.report.dataset import describe
from infini_llama.tasks.report.run import write_report
from infini_llama.tasks.tokenizers.encoder import TextEncoder
from support.models import generate, small
from support.tokenizer_kinds import of_kind
from support.trained_runs import trained_run

INFINI = {"attention": "infini", "segment_length": 8}
LOCAL = {"attention": "local", "segment_length": 8}
BEFORE = {"attend_previous_segment": True}


@pytest.fixture
def tokenizer(dataset):
    return Tokenizer.from_file(str(dataset / "tokenizer.json"))


@pytest.mark.parametrize(("depth", "before"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_a_text_has_the_requested_length_and_depth(tokenizer, depth, before):
    def size(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    least = size(HEAD + HIDDEN.format(key="12345") + QUESTION)
    asked = ask(
        TextEncoder(tokenizer, True), least + 4 * size(FILLER) + 3, depth, "12345"
    )
    text = (
        HEAD
        + FILLER * before
        + HIDDEN.format(key="12345")
        + FILLER * (4 - before)
        + QUESTION
    )
    assert list(asked.tokens()) == tokenizer.encode(
        text
    ).ids and asked.length == least + 4 * size(FILLER)
    assert asked.answer == tokenizer.encode(" 12345").ids
    assert asked.after == (4 - before) * size(FILLER)
    with pytest.raises(ConfigError, match=f"{least} tokens"):
        ask(TextEncoder(tokenizer, True), least - 1, depth, "12345")


@pytest.mark.parametrize("kind", ["llama2", "mistral", "gemma", "byte-level bpe"])
def test_tokens_are_those_of_a_text_also_where_a_tokenizer_begins_each_text_with_a_space(
    kind,
):
    described = json.loads(of_kind(kind).to_str())
    described["model"][
        "merges"
    ] = []  # these have learned some from one sentence to the next
    tokenizer = Tokenizer.from_str(json.dumps(described))
    asked = ask(TextEncoder(tokenizer, True), 2000, 0.5, "12345")
    one = replace(asked, before=len(asked.filler), after=len(asked.filler))
    text = f"{HEAD}{FILLER}{HIDDEN.format(key='12345')}{FILLER}{QUESTION} 12345"
    assert tokenizer.decode([*one.tokens(), *one.answer]) == text
    assert last_mention(asked.hidden, asked.answer) is not None


def test_text_around_a_number_hides_no_other_number(data, corpus, tmp_path):
    made = {
        "name": "a",
        "source": "passkey",
        "passkey": {"documents": 60, "repetitions": 1},
        "weight": 0.5,
    }
    sources = [made, {"name": "b", "files": [f"{corpus}/**/*.txt"], "weight": 0.5}]
    reference = preprocess(data(sources=sources, files=[]), tmp_path)
    folder = tmp_path / reference.path
    reader, text = (
        TokenReader(folder, reference.row_table, "validation"),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    rows = rows_of_text(reader, folder)
    assert 0 < len(rows) < len(reader)
    assert "pass key" not in text.decode(
        reader.gather(rows).ravel()
    ) and "pass key" in text.decode(reader.gather(np.arange(len(reader))).ravel())


def test_text_that_only_hides_numbers_is_no_filler(data, tmp_path):
    numbers = {"documents": 60, "repetitions": 1}
    made = data(source="passkey", passkey=numbers, files=[])
    reference = preprocess(made, tmp_path)
    folder = tmp_path / reference.path
    reader = TokenReader(folder, reference.row_table, "validation")
    with pytest.raises(ConfigError, match="--filler text"):
        rows_of_text(reader, folder)


@pytest.mark.parametrize("fields", [{}, INFINI, INFINI | BEFORE, LOCAL, LOCAL | BEFORE])
def test_an_answer_is_right_where_greedy_decoding_gives_it(
    run_of, tokenizer, monkeypatch, fields
):
    _, model = run_of(**fields)
    monkeypatch.setattr(module, "PIECE", 11)
    asked = ask(TextEncoder(tokenizer, True), 400, 0.3, "12345")
    written = generate(model, list(asked.tokens()), 4)
    assert (
        right_tokens(model, begin(model, replace(asked, answer=written))) == [True] * 4
    )
    other = [*written[:2], (written[2] + 1) % model.config.vocab_size, written[3]]
    right = right_tokens(model, begin(model, replace(asked, answer=other)))
    assert right[:3] == [True, True, False]


def test_rows_without_a_token_are_not_chosen(run_of, tokenizer):
    _, model = run_of()
    asked = ask(TextEncoder(tokenizer, True), 400, 0.3, "12345")
    begun = begin(model, asked)
    size = max(
        module.greedy_tokens(
            model, begun.rest, begun.states, 4, tokenizer.get_vocab_size()
        )
    )
    chosen = module.greedy_tokens(model, begun.rest, begun.states, 4, size)
    assert max(chosen) < size
    assert (
        right_tokens(
            model, begin(model, replace(asked, answer=chosen, vocab_size=size))
        )
        == [True] * 4
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    ("most", "fields"),
    [
        (4096, {"memory_maps": True}),
        (5, {"memory_update": "delta"}),
        (5, {"memory_update": "delta", **BEFORE}),
    ],
)
def test_a_text_that_lies_behind_is_remembered_as_if_it_were_read(
    tokenizer, monkeypatch, most, fields
):
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 5, "memory_layers": (1, 3)}
    model = (
        Llama(
            small(vocab_size=tokenizer.get_vocab_size(), **INFINI, **layers, **fields)
        )
        .double()
        .eval()
    )
    for name, parameter in model.named_parameters():
        if ".memory_" in name:
            torch.nn.init.normal_(parameter, 0, 0.5)
    asked = ask(TextEncoder(tokenizer, True), 900, 0.3, "12345")
    monkeypatch.setattr(module, "PIECE", 40)
    monkeypatch.setattr(module, "KNOWN_SEGMENTS", most)
    begun, read = begin(model, asked), model.new_states(1, asked.length)
    rest = module.read(model, begun.rest, begun.states)
    whole = module.read(model, list(asked.tokens()), read)
    torch.testing.assert_close(rest, whole[:, -len(begun.rest) :])
    for number in (1, 3):
        torch.testing.assert_close(
            [*begun.states.layers[number].memory], [*read.layers[number].memory]
        )


def test_every_length_and_depth_with_and_without_memory(run_of, read_page):
    folder, _ = run_of(attention="infini", segment_length=32)
    record = find_passkeys(folder, "latest", [300, 400], [0.0, 1.0], samples=2, seed=3)
    for cells in (record.memory, record.no_memory):
        assert [(cell.length, cell.depth) for cell in cells] == [
            (300, 0.0),
            (300, 1.0),
            (400, 0.0),
            (400, 1.0),
        ]
        assert all(cell.tokens <= cell.length and cell.found == 0 for cell in cells)
        assert cells[0].boundaries > cells[1].boundaries + 1
        assert (cells[0].controls is not None) == (cells is record.memory)
    write_report(folder)
    assert "Passkey" in read_page((folder / "report.html").read_text()).text


def other_answers(tokenizer, statement):
    """What else is hidden, as tokens."""
    return [
        tokenizer.encode(f" {other.rstrip('.').split()[-1]}").ids
        for other in statement.others
    ]


@pytest.mark.parametrize(
    ("ends", "form"),
    [*((ends, "passkey") for ends in (0, 3, 40)), *((9, form) for form in FORMS)],
)
def test_every_answer_token_is_predicted_that_many_boundaries_later(
    tokenizer, ends, form
):
    size, places = 64 if ends else 128, set()
    for seed in range(30):
        statement = FORMS[form](Random(seed))
        asked = ask_across(
            TextEncoder(tokenizer, True),
            size,
            ends,
            statement,
            Random(seed),
            tokenizer.encode(FILLER).ids,
        )
        tokens, answer = list(asked.tokens()), asked.answer
        assert (
            len(tokens) == asked.length
            and answer == tokenizer.encode(f" {statement.answer}").ids
        )
        mentions = [
            at for at in range(len(tokens)) if tokens[at : at + len(answer)] == answer
        ]
        # The question has none.
        assert len(mentions) == statement.statement.count(statement.answer)
        places.add(mentions[-1] % size)
        last = {(mentions[-1] + place) // size for place in range(len(answer))}
        predicted = {(len(tokens) - 1 + place) // size for place in range(len(answer))}
        assert len(last) == len(
            predicted
        ) == 1 and predicted.pop() - last.pop() == ends == asked.boundaries(size)
        ids = other_answers(tokenizer, statement)
        others = [
            at
            for at in range(len(tokens))
            if any(tokens[at : at + len(other)] == other for other in ids)
        ]
        assert len(others) == len(statement.others) and all(
            at < mentions[0] for at in others
        )
    assert len(places) > 10


def test_a_distance_shorter_than_the_question_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="--segments"):
        ask_across(
            TextEncoder(tokenizer, True),
            4,
            1,
            FORMS["passkey"](Random(0)),
            Random(0),
            [1],
        )


@pytest.mark.parametrize(
    ("form", "filler"),
    [("passkey", "repeated"), ("overwritten", "random"), ("variables", "text")],
)
def test_retrieval_by_segment_boundaries_with_and_without_memory(run_of, form, filler):
    folder, _ = run_of(attention="infini", segment_length=64)
    facts = HiddenFacts(form, samples=2, seed=3)
    record = find_passkeys_across(folder, "latest", [3, 5], facts, filler)
    assert (record.form, record.filler) == (form, filler)
    for cells in (record.memory, record.no_memory):
        assert [cell.boundaries for cell in cells] == [3, 5]
        assert all(len(cell.right_by_token) >= 1 and cell.found == 0 for cell in cells)


def test_boundaries_that_were_requested_are_on_record_for_full_attention_too(run_of):
    folder, _ = run_of(segment_length=64)
    facts = HiddenFacts("passkey", samples=2, seed=3)
    record = find_passkeys_across(folder, "latest", [3, 5], facts, "repeated")
    assert [cell.boundaries for cell in record.model] == [3, 5]


def test_by_default_no_text_is_shorter_than_the_number_and_the_question(run_of):
    folder, _ = run_of()
    record = find_passkeys(folder, "latest", depths=[0.5], samples=3)
    row = record.trained_length
    lengths = {cell.length for cell in record.model}
    assert row == 16 and min(lengths) > 8 * row


def recorded_texts(monkeypatch):
    """All texts that are measured from here on."""
    texts = []
    measured = module._measured

    def recording(model, asked, *rest):
        texts.extend(asked)
        return measured(model, asked, *rest)

    monkeypatch.setattr(module, "_measured", recording)
    return texts


@pytest.mark.parametrize("stride", [None, 8])
def test_held_out_text_never_repeats_within_a_text(ranks, data, tmp_path, stride):
    """Rows of a window strategy overlap; their text is not read twice."""
    packing = {"packing": "window", "stride": stride} if stride else {}
    reference = preprocess(data(sequence_length=32, **packing), tmp_path)
    folder, _ = trained_run(
        tmp_path, reference, data(), attention="infini", segment_length=64
    )
    reader = verified_reader(folder, "validation")
    encoder = TextEncoder(
        Tokenizer.from_file(str(tmp_path / reference.path / "tokenizer.json")), True
    )
    filler = filler_tokens(folder, encoder, "text", 10**9)
    stream = np.empty(reader.stream.ends[-1], dtype=np.int64)
    reader.stream.copy(0, stream)
    text = stream[stream != reader.padding].tolist()
    assert filler == text[: len(filler)] and len(text) - len(filler) <= 33
    many = len(filler) // 64 + 1
    facts = HiddenFacts("passkey", samples=1, seed=0)
    with pytest.raises(
        ConfigError, match=r"--filler text: [\d,]+ tokens .* give fewer --segments"
    ):
        find_passkeys_across(folder, "latest", [3, many], facts, "text")
    find_passkeys_across(folder, "latest", [many], facts, "repeated")


def book_of(folder, words=3000):
    """A file of words in random order, all of them different from their neighbours."""
    random = Random(1)
    (folder / "book.txt").write_text(
        " ".join(f"w{random.randrange(10**4)}" for _ in range(words))
    )
    return str(folder / "book.txt")


@torch.inference_mode()
@pytest.mark.parametrize(
    ("form", "changes", "ends"),
    [
        *((form, {}, BOUNDARIES_AFTER) for form in FORMS),
        ("facts", {"num_hidden_layers": 9, **BEFORE}, 10),
    ],
)
def test_states_after_a_text_that_is_read_once_are_those_of_reading_each_text_whole(
    tokenizer, monkeypatch, form, changes, ends
):
    torch.manual_seed(0)
    fields = {
        **INFINI,
        "segment_length": 32,
        "num_hidden_layers": 5,
        "memory_layers": (1, 3),
    }
    fields |= changes
    model = (
        Llama(small(vocab_size=tokenizer.get_vocab_size(), **fields)).double().eval()
    )
    texts = recorded_texts(monkeypatch)
    begun = []
    monkeypatch.setattr(
        module,
        "begin",
        lambda *arguments: begun.append((arguments, begin(*arguments))) or begun[-1][1],
    )
    encoder = TextEncoder(tokenizer, True)
    book = Random(2).choices(range(250), k=3000)
    results = passkey_after(model, encoder, [900, 300], HiddenFacts(form, 3, 0), book)
    assert [cell["memory"].length for cell in results] == [300, 900]
    start = module.in_text(encoder, FORMS[form](Random(0)).head, "") + book
    for asked in texts:
        tokens = list(asked.tokens())
        size = len(asked.head)
        assert size in (288, 896) and asked.boundaries(32) == ends
        without = tokens[: size + asked.before]
        without += tokens[
            size + asked.before + len(asked.hidden) : -len(asked.question)
        ]
        assert without == start[: len(without)], (
            "the text continues around what is hidden"
        )
    once = [(rest[0], found) for (_, *rest), found in begun if rest[1] is not None]
    assert len(once) == 2 * (3 + 1), (
        "each text, and one of each length that hides nothing"
    )
    for asked, found in once:
        whole = begin(model, asked)
        assert found.rest == whole.rest
        for number in (1, 3):
            torch.testing.assert_close(
                [*found.states.layers[number].memory],
                [*whole.states.layers[number].memory],
            )


def test_retrieval_after_other_text_with_and_without_memory(
    run_of, tmp_path, read_page, caplog
):
    folder, _ = run_of(attention="infini", segment_length=64)
    book = book_of(tmp_path)
    caplog.set_level("INFO")
    facts = HiddenFacts("facts", samples=2, seed=3)
    record = find_passkeys_after(folder, [book], "latest", None, [500, 200], facts)
    assert (record.form, record.filler, record.text) == ("facts", "files", (book,))
    assert "read once" in caplog.text
    for cells in (record.memory, record.no_memory):
        assert [(cell.length, cell.depth, cell.boundaries) for cell in cells] == [
            (200, 1.0, BOUNDARIES_AFTER),
            (500, 1.0, BOUNDARIES_AFTER),
        ]
    assert all(cell.controls is not None for cell in record.memory)
    write_report(folder)
    assert "files" in read_page((folder / "report.html").read_text()).text
    with pytest.raises(
        ConfigError, match=r"--files, length 90,000: .* shorter --lengths"
    ):
        find_passkeys_after(folder, [book], "latest", None, [200, 90_000], facts)


def test_text_before_the_facts_needs_no_answer_where_the_runs_own_text_has_some(
    ranks, data, tmp_path
):
    made = {"documents": 60, "repetitions": 2}
    settings = data(
        source="passkey", passkey=made, loss_on="answer", answer_after=QUESTION
    )
    reference = preprocess(settings, tmp_path)
    folder, _ = trained_run(
        tmp_path, reference, settings, attention="infini", segment_length=64
    )
    (tmp_path / "book.txt").write_text(FILLER * 100)
    facts = HiddenFacts("passkey", samples=2, seed=0)
    record = find_passkeys_after(
        folder, [str(tmp_path / "book.txt")], "latest", None, [30], facts
    )
    assert [cell.tokens > 8 * 64 for cell in record.memory] == [True], (
        "shorter than a segment"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no memory"),
        ({"attention": "infini", "memory_update": "delta"}, "has delta"),
    ],
)
def test_only_a_memory_that_adds_reads_one_text_for_all(
    run_of, tmp_path, fields, words
):
    folder, _ = run_of(**fields)
    with pytest.raises(ConfigError, match=words):
        find_passkeys_after(
            folder,
            [book_of(tmp_path)],
            "latest",
            None,
            [200],
            HiddenFacts("passkey", 1, 0),
        )


def test_shares_are_those_of_the_samples(run_of, tokenizer, monkeypatch):
    _, model = run_of()
    answers = iter([[True, True], [True, False], [True, True], [False, False]])
    monkeypatch.setattr(module, "right_tokens", lambda model, begun: next(answers))
    (cell,) = passkey(model, TextEncoder(tokenizer, True), [300], [0.5], samples=4)
    assert (cell["model"].found, cell["model"].right_tokens) == (0.5, 5 / 8)
    assert cell["model"].right_by_token == (3 / 4, 2 / 4)


class SaysWhatTheMemoryHolds:
    """Decodes the answer of the text whose state is read, whatever is asked."""

    def __init__(self, answers):
        self.answers = answers

    def __call__(self, model, rest, states, count, vocab_size):
        return self.answers.get(float(states.layers[-1].memory.z.sum()), [0] * count)


def test_controls_use_the_memory_of_another_text_and_of_filler(
    run_of, tokenizer, monkeypatch
):
    _, model = run_of(**INFINI)
    size = len(tokenizer.encode(" 12345").ids)
    keys = [
        key
        for key in map(str, range(12345, 99999, 1111))
        if len(tokenizer.encode(f" {key}").ids) == size
    ]
    texts = [
        begin(model, ask(TextEncoder(tokenizer, True), 400, 0.3, key))
        for key in keys[:3]
    ]
    held = {
        float(one.states.layers[-1].memory.z.sum()): one.asked.answer for one in texts
    }
    assert len(held) == 3
    monkeypatch.setattr(module, "greedy_tokens", SaysWhatTheMemoryHolds(held))
    record = controls(model, texts)
    assert (record.swapped_own, record.swapped_other, record.filler_alone) == (
        0.0,
        1.0,
        0.0,
    )
    monkeypatch.setattr(
        module,
        "greedy_tokens",
        lambda model, rest, states, count, vocab_size: texts[0].asked.answer,
    )
    record = controls(model, texts)
    assert (record.swapped_own, record.swapped_other, record.filler_alone) == (
        1 / 3,
        1 / 3,
        1 / 3,
    )


def test_controls_exchange_the_memory_alone_and_only_beyond_what_segments_see(
    run_of, tokenizer
):
    _, model = run_of(**INFINI, **BEFORE)
    encoder = TextEncoder(tokenizer, True)
    mine, theirs = (
        begin(model, ask(encoder, length, 0.3, key))
        for length, key in ((400, "12345"), (300, "54321"))
    )
    exchanged = module.with_memory_of(mine.states, theirs.states)
    for own, other, mixed in zip(
        mine.states.layers, theirs.states.layers, exchanged.layers, strict=True
    ):
        assert (
            torch.equal(mixed.memory.M, other.memory.M)
            and mixed.written == other.written
        )
        assert (
            not torch.equal(own.memory.M, other.memory.M)
            and own.written != other.written
        )
        assert all(map(torch.equal, mixed.earlier, own.earlier))
        assert not torch.equal(own.earlier.k, other.earlier.k)
    _, deeper = run_of(
        "deeper", attention="infini", segment_length=64, num_hidden_layers=4, **BEFORE
    )
    filler = tokenizer.encode(FILLER).ids
    cells = module.passkey_across(
        deeper, encoder, [4, 5], HiddenFacts("passkey", 2, 0), filler
    )
    assert [cell["memory"].controls is not None for cell in cells] == [False, True]


def test_texts_are_reproducible_and_cut_the_filler_between_words():
    settings = PasskeyConfig(documents=300, repetitions=3)
    texts = list(passkey_texts(settings))
    assert texts == list(passkey_texts(settings))
    after = []
    for text in texts:
        key = text[-6:-1]
        assert (
            text.count(key) == 3
            and text.startswith(HEAD)
            and text.endswith(f"{QUESTION} {key}.")
        )
        hidden = HIDDEN.format(key=key)
        before, _, rest = text[len(HEAD) : -len(f"{QUESTION} {key}.")].partition(hidden)
        words = (before + rest).split()
        assert " ".join(words) in " ".join([FILLER.strip()] * 5) and len(
            words
        ) <= 3 * len(FILLER.split())
        after.append(len(rest.split()))
    assert len(set(after)) > 30 and 30 < after.count(0) < 120


@pytest.mark.parametrize("form", FORMS)
def test_each_form_hides_its_answer_before_a_question_that_ends_alike(form):
    settings = PasskeyConfig(documents=50, repetitions=3, form=form, filler="random")
    digits = 7 if form == "niah_single" else 5
    texts, is_last, ends = list(passkey_texts(settings)), [], set()
    for text in texts:
        statement, _, rest = text.rpartition("? ")
        *_, before, verb, answer = rest.rstrip(".").split()
        ends.add((before, verb))
        assert re.fullmatch(rf"\d{{{digits}}}", answer)
        assert answer in statement and FILLER not in text
        numbers = re.findall(r"\d{5,}", statement)
        is_last.append(numbers[-1] == answer)
        if form == "facts":
            name = statement.split()[-1]
            assert (
                len(set(numbers)) == 3
                and f"number of the {name} is {answer}" in statement
            )
        if form == "overwritten":
            assert numbers[-1] == answer != numbers[0]
    assert all(is_last) == (form != "facts"), (
        "of several facts, the place does not say which one is asked for"
    )
    assert len(ends) == 1


def test_sentences_say_the_number_of_a_thing_once():
    facts = [sentences(Random(seed)) for seed in range(400)]
    assert all(fact.statement.count(fact.answer) == 1 for fact in facts)
    assert len({fact.question for fact in facts}) > 80
    said = {re.sub(r"\d+", "", fact.statement) for fact in facts}
    about_the_key = {words for words in said if "pass key" in words}
    assert len(about_the_key) == len(SENTENCES)
    for fact in facts:
        subject = fact.question.removeprefix(" What is ").removesuffix("? It is")
        assert subject in fact.statement.lower()


def test_random_filler_continues_where_what_is_hidden_interrupts_it(tokenizer):
    filler = list(range(40, 90))
    asked = ask_across(
        TextEncoder(tokenizer, True),
        64,
        5,
        FORMS["passkey"](Random(0)),
        Random(0),
        filler,
    )
    head, before, hidden, after = asked.head, asked.before, asked.hidden, asked.after
    tokens = list(asked.tokens())[len(head) : -len(asked.question)]
    between = tokens[:before] + tokens[before + len(hidden) :]
    start = filler.index(between[0])
    assert between == [filler[(start + place) % 50] for place in range(before + after)]


def test_a_passkey_dataset_is_built_from_its_settings(data, tmp_path):
    settings = data(source="passkey", passkey={"documents": 20, "repetitions": 2})
    inputs = source_of(settings).inputs(NotText(tmp_path / "home"))
    (source,) = inputs.training
    assert not inputs.validation
    assert list(source.records()) == list(passkey_texts(settings.passkey))
    reference = preprocess(settings, tmp_path)
    assert reference.train.documents + reference.validation.documents == 20
    assert preprocess(settings, tmp_path).built == ()
    once = data(source="passkey", passkey={"documents": 20, "repetitions": 1})
    assert preprocess(once, tmp_path).digest != reference.digest
    assert describe(tmp_path / reference.path).license == "none: made by this program"


def test_no_text_is_longer_than_a_document(data):
    most = data(source="passkey", passkey={"repetitions": 100_000}).passkey.repetitions
    assert most * len(FILLER) < LONGEST_DOCUMENT / 1.5, (
        "the words of data.files are longer"
    )
    with pytest.raises(ValidationError, match="repetitions"):
        data(source="passkey", passkey={"repetitions": most + 1})
