import base64
import json
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.tokenizers.encoder import encoder_of, special_ids
from infini_llama.tasks.tokenizers.tiktoken_encodings import (
    byte_letters,
    from_rank_file,
)
from infini_llama.tasks.tokenizers.tokenizer import (
    EOS,
    EOS_ID,
    end_of_text,
    load,
    token_bytes,
    train,
)
from infini_llama.tasks.verify_data.checks import verify
from support.texts import write_files
from support.tokenizer_kinds import train_bpe

TEXTS = [
    "the cat sat on the mat",
    "def value(self): return self.value",
    f"it says {EOS} and <pad>",
] * 20
KINDS = ("bpe", "wordpiece", "unigram")


def section(**given: object) -> TokenizerConfig:
    return TokenizerConfig.model_validate({"vocab_size": 320} | given)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    return {
        kind: train(TEXTS, section(kind=kind, special_tokens=["<pad>"]))
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(
    text=st.text(max_size=200)
    | st.lists(st.sampled_from([EOS, "<pad>", "<|", " ", "the"])).map("".join)
)
@example(text="x" * 1000)
@example(text=f"{EOS}<pad>")
def test_any_text_survives_each_kind_and_yields_no_special_token(trained, kind, text):
    encoder = encoder_of(trained[kind], True)
    ids = encoder.encode(text, add_special_tokens=False).ids
    assert not special_ids(trained[kind])[ids].any() and special_ids(
        trained[kind]
    ).tolist()[:3] == [True, True, False]
    assert encoder.decode(ids, skip_special_tokens=False) == text
    assert token_bytes(trained[kind], True)[ids].sum() == len(text.encode())
    assert [
        one.ids for one in encoder.encode_batch_fast([text], add_special_tokens=False)
    ] == [ids]
    assert (trained[kind].token_to_id(EOS), trained[kind].token_to_id("<pad>")) == (
        0,
        1,
    )


def test_the_encoder_of_a_bpe_tokenizer_differs_by_its_special_tokens_alone():
    tokenizer = train_bpe(["ab abc"] * 9, vocab_size=300, special=["<x>"])
    encoder, description = encoder_of(tokenizer, True), json.loads(tokenizer.to_str())
    assert json.loads(encoder.to_str()) == description | {"added_tokens": []}
    assert (
        len(tokenizer.get_added_tokens_decoder()) == 2
        and not encoder.get_added_tokens_decoder()
    )


def test_a_vocabulary_learned_from_end_of_text_markers_yields_none():
    encoder = encoder_of(train_bpe([EOS * 50] * 50, vocab_size=600), True)
    assert (
        EOS_ID not in encoder.encode(EOS * 3 + f" {EOS}", add_special_tokens=False).ids
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_learned_from_no_text(kind):
    learned = train([], section(kind=kind))
    assert Tokenizer.from_str(learned.to_str()).get_vocab() == learned.get_vocab()
    assert (
        encoder_of(learned, True).decode(
            encoder_of(learned, True).encode("any text").ids
        )
        == "any text"
    )


def test_new_text_does_not_change_a_given_tokenizer(data, corpus, tmp_path):
    first = preprocess(data(), tmp_path)
    file = tmp_path / first.path / "tokenizer.json"
    (tmp_path / "more.txt").write_text("entirely other text, ever more of it " * 50)
    given = data(
        files=[f"{corpus}/*.txt", f"{tmp_path}/more.txt"], tokenizer={"path": str(file)}
    )
    second = preprocess(given, tmp_path)
    assert (tmp_path / second.path / "tokenizer.json").read_bytes() == file.read_bytes()
    assert second.vocab_size == first.vocab_size and second.path != first.path
    verify(second, tmp_path, "deep")
    again = preprocess(
        data(tokenizer={"path": str(file.rename(tmp_path / "elsewhere.json"))}),
        tmp_path,
    )
    assert again.path not in (first.path, second.path)


@pytest.fixture
def lossy(tmp_path) -> Tokenizer:
    """A tokenizer that changes text, and is saved."""
    tokenizer = Tokenizer(
        models.WordPiece(
            {"[UNK]": 0, "[END]": 1, "the": 2, "cat": 3, "##s": 4}, unk_token="[UNK]"
        )
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.Lowercase(),
        pre_tokenizers.Whitespace(),
    )
    tokenizer.add_special_tokens(["[UNK]", "[END]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


def test_a_hugging_face_folder_defines_the_end_of_text(data, tmp_path, lossy):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "[END]"}})
    )
    given = section(path=str(tmp_path))
    assert end_of_text(load(given), given) == 1 and token_bytes(
        lossy, True
    ).tolist() == [
        0,
        0,
        3,
        3,
        1,
    ]
    files = write_files(
        tmp_path, ("The cat cats THE " * number for number in range(1, 31))
    )
    reference = preprocess(
        data(files=[files], tokenizer={"path": str(tmp_path)}), tmp_path / "home"
    )
    report = verify(reference, tmp_path / "home", "deep")
    assert any("changes text" in check.detail for check in report.checks)
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer\.eos.*<end>.*\[UNK\], \[END\]"
    ):
        load(section(path=str(tmp_path), eos="<end>"))


@pytest.mark.usefixtures("lossy")
def test_special_tokens_that_a_given_tokenizer_lacks_are_named(tmp_path):
    load(section(path=str(tmp_path), eos="[END]", special_tokens=["[UNK]"]))
    for token in ("<pad>", "cat"):  # the second one is an ordinary token
        with pytest.raises(
            ConfigError,
            match=rf"data\.tokenizer\.special_tokens=\['{token}'\].*tokenizer\.json",
        ):
            load(
                section(
                    path=str(tmp_path), eos="[END]", special_tokens=["[UNK]", token]
                )
            )


@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("named", [".", "tokenizer.json"])
@pytest.mark.parametrize(
    "stating", ["tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_file_beside_the_tokenizer_names_the_end_of_text(tmp_path, named, stating):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / stating).write_text(json.dumps({"eos_token": "[END]"}))
    given = section(path=str(tmp_path / named))
    assert end_of_text(load(given), given) == 1


@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("named", [".", "tokenizer.json"])
@pytest.mark.parametrize(
    ("beside", "content"),
    [
        (
            "tokenizer_config.json",
            {
                "eos_token": "[END]",
                "added_tokens_decoder": {"5": {"content": "<|im_end|>"}},
            },
        ),
        ("added_tokens.json", {"<|im_end|>": 5}),
        ("added_tokens.json", {"[END]": 3}),
    ],
)
def test_added_tokens_that_only_a_file_beside_the_tokenizer_has_are_refused(
    tmp_path, named, beside, content
):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    (tmp_path / beside).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{beside}.*(im_end|END)"):
        load(section(path=str(tmp_path / named)))
    (tmp_path / "other.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    load(section(path=str(tmp_path / "other.json"), eos="[END]"))


SPECIAL = ["</s>", "[UNK]"]
LETTERS = [chr(letter) for letter in range(32, 127)]


def unigram() -> Tokenizer:
    return Tokenizer(
        models.Unigram(
            [("</s>", 0.0), ("[UNK]", 0.0), *((letter, -5.0) for letter in LETTERS)],
            unk_id=1,
        )
    )


def word_level() -> Tokenizer:
    """One token per character, or per text in brackets."""
    tokenizer = Tokenizer(
        models.WordLevel(
            {text: id for id, text in enumerate([*SPECIAL, *LETTERS])}, "[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</s>|\[UNK\]|."), "isolated")
    return tokenizer


@pytest.mark.parametrize("made", [unigram, word_level])
@pytest.mark.parametrize("added", [[], ["plain", "words"]])
def test_special_tokens_in_a_models_own_vocabulary_are_not_found_in_text(made, added):
    tokenizer = made()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(added)
    encoder, special = encoder_of(tokenizer, True), special_ids(tokenizer)
    ids = encoder.encode("a</s>b日plain", add_special_tokens=False).ids
    parts = [
        "a",
        *("</s>" if made is unigram else ["[UNK]"]),
        "b",
        "[UNK]",
        *(added[:1] or "plain"),
    ]
    assert (
        ids == [tokenizer.token_to_id(part) for part in parts]
        and not special[ids].any()
    )
    assert (
        encoder.get_vocab_size() == tokenizer.get_vocab_size()
        and special[tokenizer.token_to_id("</s>")]
    )


def test_text_that_encodes_to_a_special_token_is_refused_with_its_file(data, tmp_path):
    vocab = {text: id for id, text in enumerate(["</s>", *LETTERS, "</", "s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("<", "/"), ("s", ">"), ("</", "s>")]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = write_files(tmp_path, ["with s> in it"] * 7 + ["with </s> in it"])
    with pytest.raises(DataError, match=r"/7\.txt .*</s>"):
        preprocess(
            data(files=[files], tokenizer={"path": str(tmp_path)}), tmp_path / "home"
        )


def test_a_special_token_that_is_also_learned_is_refused_with_the_keys_that_help(
    data, tmp_path
):
    """BPE merges `###`, which is one word of the text, to the ID of the special token."""
    files = write_files(tmp_path, [f"### title {number}" for number in range(40)])
    settings = {"vocab_size": 300, "special_tokens": ["###"]}
    keys = r"split_special_tokens=false .* data\.tokenizer\.special_tokens"
    with pytest.raises(DataError, match=rf"contains '###'.*{keys}"):
        preprocess(data(files=[files], tokenizer=settings), tmp_path / "home")
    settings |= {"split_special_tokens": False}
    preprocess(data(files=[files], tokenizer=settings), tmp_path / "home")


@pytest.mark.parametrize("added", [[], [{"special": False}]])
def test_a_text_that_spells_an_end_of_text_that_is_no_special_token_does_not_end(
    data, tmp_path, caplog, added
):
    written = described()
    written["added_tokens"] = [
        written["added_tokens"][0] | changes for changes in added
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    texts = [f"text {number} with </s> in it, twice: </s>" for number in range(30)]
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps(text) + "\n" for text in texts)
    )
    given = data(files=[str(tmp_path / "x.jsonl")], tokenizer={"path": str(tmp_path)})
    reference = preprocess(given, tmp_path / "home")
    verify(reference, tmp_path / "home", "deep")
    assert reference.train.tokens + reference.validation.tokens == sum(
        map(len, texts)
    ) + len(texts)
    stored = Tokenizer.from_file(
        str(tmp_path / "home" / reference.path / "tokenizer.json")
    )
    assert special_ids(stored).tolist() == [True] + [False] * 97
    assert caplog.text.count("is no special token") == 1


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff", b"[1]", b'{"eos_token": 1}', b'{"eos_token": {}}', b"[" * 10**5],
)
def test_a_damaged_tokenizer_config_is_named(tmp_path, content):
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load(section(path=str(tmp_path)))
    assert end_of_text(tokenizer, section(path=str(tmp_path), eos=EOS)) == 0


@pytest.mark.usefixtures("lossy")
def test_equal_tokens_in_both_splits_pass_if_the_tokenizer_changes_text(data, tmp_path):
    cases = [
        "".join(letters) for letters in product(*zip("thecat", "THECAT", strict=True))
    ]
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps(f"{case[:3]} {case[3:]} " * 9) + "\n" for case in cases)
    )
    given = {"path": str(tmp_path / "tokenizer.json"), "eos": "[END]"}
    reference = preprocess(
        data(files=[str(tmp_path / "x.jsonl")], tokenizer=given), tmp_path / "home"
    )
    verify(reference, tmp_path / "home", "deep")


def literal_bpe(ranks: dict[bytes, int], word: bytes) -> list[int]:
    """tiktoken's rule, word for word: join the leftmost neighbours whose joined bytes have the lowest rank."""
    parts = [bytes([byte]) for byte in word]
    while True:
        joined = [
            (ranks[left + right], k)
            for k, (left, right) in enumerate(pairwise(parts))
            if left + right in ranks
        ]
        if not joined:
            return [ranks[part] for part in parts]
        _, k = min(joined)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """Ranks as tiktoken's training makes them: 256 bytes, then merges by frequency; with their file and its encoder."""
    tokenizer = train_bpe(
        [*TEXTS, "abababaab aab baa abba " * 30, "größer 日本語 " * 9] * 2, 400
    )
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocabulary = sorted(
        (number, token) for token, number in tokenizer.get_vocab().items() if number
    )
    learned = [
        bytes(byte_of[letter] for letter in token)
        for _, token in vocabulary
        if len(token) > 1
    ]
    ranks = {
        token: rank
        for rank, token in enumerate(
            [*(bytes([byte]) for byte in range(256)), *learned]
        )
    }
    file = tmp_path_factory.mktemp("ranks") / "x.tiktoken"
    file.write_text(
        "".join(
            f"{base64.b64encode(token).decode()} {rank}\n"
            for token, rank in ranks.items()
        )
    )
    return ranks, file, encoder_of(from_rank_file(file, r"[\s\S]+", [EOS]), True)


@settings(max_examples=300, deadline=None)
@given(word=st.text(st.sampled_from("abthecsü日 "), max_size=30) | st.text(max_size=20))
@example(word=EOS)  # hypothesis takes constants from the source, too
def test_a_rank_file_gives_tiktokens_ids(ranked, word):
    ranks, _, encoder = ranked
    assert encoder.encode(word, add_special_tokens=False).ids == literal_bpe(
        ranks, word.encode()
    )


def test_a_rank_file_is_a_tokenizer_for_a_dataset(ranked, data, tmp_path):
    reference = preprocess(data(tokenizer={"path": str(ranked[1])}), tmp_path)
    assert reference.vocab_size == len(ranked[0]) + 1
    verify(reference, tmp_path, "deep")
    assert np.load(tmp_path / reference.path / "token_bytes.npy")[-1] == 0


def described(**model: object) -> dict[str, Any]:
    """The tokenizer.json of a small BPE with a token that ends texts, whose model is changed."""
    letters = {
        letter: number for number, letter in enumerate(["</s>", *LETTERS, "ab", "abc"])
    }
    tokenizer = Tokenizer(models.BPE(letters, [("a", "b"), ("ab", "c")]))
    tokenizer.add_special_tokens(["</s>"])
    written = json.loads(tokenizer.to_str())
    written["model"] |= model
    return written


def test_what_makes_encoding_differ_is_off_with_a_warning(data, tmp_path, caplog):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(
            json.dumps({"text": f"abcabcabc {number} " * 9}) + "\n"
            for number in range(30)
        )
    )
    datasets = []
    for name, changes in {
        "steady": {},
        "one": {"dropout": 0.5},
        "two": {"dropout": 0.5},
    }.items():
        written = described(**changes)
        if changes:
            written["truncation"] = {
                "direction": "Right",
                "max_length": 4,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        (tmp_path / f"{name}.json").write_text(json.dumps(written))
        given = data(
            files=[str(texts)], tokenizer={"path": str(tmp_path / f"{name}.json")}
        )
        reference = preprocess(given, tmp_path / name)
        verify(reference, tmp_path / name, "deep")
        datasets.append(
            (
                reference.digest,
                (tmp_path / name / reference.path / "tokenizer.json").read_text(),
            )
        )
    assert datasets[0] == datasets[1] == datasets[2]
    assert "dropout" in caplog.text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda text: text.replace('"b": 67', '"b": 66'), "'a' and 'b'"),
        (
            lambda text: text.replace('"b": 67', '"b": 66').replace(
                '"abc": 97', '"abc": 98'
            ),
            "'a' and 'b'",
        ),
        (lambda text: text.replace('"abc": 97', '"abc": 99'), "gaps"),
        (lambda text: text.replace('"b": 67', '"b": 67, "b": 68'), "'b' occurs twice"),
        (lambda text: text.replace('"id": 0', '"id": 5'), "'</s>' two IDs"),
    ],
)
def test_ambiguous_ids_are_refused(tmp_path, changed, words):
    file = tmp_path / "tokenizer.json"
    text = json.dumps(described())
    file.write_text(changed(text))
    assert file.read_text() != text
    with pytest.raises(ConfigError, match=words):
        load(section(path=str(file)))
    file.write_text(text)
    assert load(section(path=str(file))).get_vocab_size() == 98


def test_a_piece_twice_in_a_unigram_is_refused(tmp_path):
    written = json.loads(unigram().to_str())
    written["model"]["vocab"].append(["a", -1.0])
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="'a' two IDs"):
        load(section(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\xff"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n"),
        ("vocab.json", b'{"a": 0, "b": 1}'),
        ("vocab.txt", b"[PAD]\n[UNK]\n"),
        ("merges.txt", b"#version: 0.2\na b\n"),
    ],
)
def test_another_file_of_a_tokenizer_is_refused_with_what_makes_a_tokenizer_json(
    tmp_path, name, content
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"AutoTokenizer\.from_pretrained\("
    ) as raised:
        load(TokenizerConfig(path=str(tmp_path / name)))
    assert "tokenizer.json" in str(raised.value)
    (tmp_path / "own.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not a tokenizer \(.*\)\.$"):
        load(TokenizerConfig(path=str(tmp_path / "own.json")))


def test_a_tokenizer_without_a_list_of_added_tokens_is_read(tmp_path):
    written = described()
    del written["added_tokens"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    assert load(section(path=str(tmp_path))).get_vocab_size() == 98


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": described()["model"] | {"merges": [["abc", "abc"]]}},
    ],
)
def test_what_makes_the_library_panic_is_refused(tmp_path, changes):
    (tmp_path / "tokenizer.json").write_text(json.dumps(described() | changes))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load(section(path=str(tmp_path)))
