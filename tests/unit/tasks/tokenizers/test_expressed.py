"""What a tokenizer has no token for is counted by file, refused where it is much, and never taken for text that came through."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.preprocess.sources.files import File
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.parts import Abandoned, Documents
from infini_llama.tasks.preprocess.tokens.units import recipe_for, write_unit
from infini_llama.tasks.report.dataset import describe
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.tokenizers.encoder import encoder_of
from infini_llama.tasks.tokenizers.engines import reference_engine
from infini_llama.tasks.tokenizers.expressed import Losses, has_all_bytes, keeps_text
from infini_llama.tasks.tokenizers.tokenizer import token_bytes, train
from infini_llama.tasks.verify_data.checks import verify
from support.damage import reseal

LETTERS = [chr(letter) for letter in range(32, 127)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def ids(*pieces: str) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(["</s>", "<unk>", *pieces])}


def scores(*pieces: str) -> list[tuple[str, float]]:
    return [(piece, -1.0) for piece in ids(*pieces)]


def bpe(*pieces: str, **settings: object) -> models.Model:
    return models.BPE(ids(*pieces), [], **settings)


def over_bytes(model: models.Model, *words: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path, *added: str) -> dict[str, str]:
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    tokenizer.add_tokens([*added])
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"path": str(folder / "tokenizer.json")}


def write(folder: Path, strange: str) -> list[str]:
    """Thirty files of plain text, of which the seventh has some more."""
    for number in range(30):
        (folder / f"{number}.txt").write_text(
            f"text number {number}, and more of it. " * 40 + strange * (number == 7)
        )
    return [f"{folder}/*.txt"]


LOSSY = {
    "dropped": Tokenizer(bpe(*LETTERS)),
    "unknown": Tokenizer(bpe(*LETTERS, unk_token="<unk>", fuse_unk=True)),
    "unigram": Tokenizer(models.Unigram(scores(*LETTERS), unk_id=1)),
    "some bytes": over_bytes(bpe(*ALPHABET[:94], "Ġ")),
    "some of the fallback": Tokenizer(bpe(*LETTERS, *BYTES[:200], byte_fallback=True)),
    "words": Tokenizer(
        models.WordPiece(
            ids(*LETTERS, *(f"##{letter}" for letter in LETTERS)), unk_token="<unk>"
        )
    ),
}
LOSSY["words"].pre_tokenizer = pre_tokenizers.Whitespace()


@pytest.mark.parametrize("kind", LOSSY)
def test_much_text_without_tokens_is_refused_with_its_file_and_a_little_is_counted(
    data, tmp_path, caplog, kind
):
    given = data(
        files=write(tmp_path, "日本語の文章。 " * 20),
        tokenizer=saved(LOSSY[kind], tmp_path),
    )
    with pytest.raises(DataError, match=r"7\.txt.*data\.files"):
        preprocess(given, tmp_path / "home")
    write(tmp_path, "日本")
    reference = preprocess(given, tmp_path / "home")
    lost = read_dataset(tmp_path / "home" / reference.path).meta.inexpressible
    assert 0 < lost.share < 0.001 and "7.txt" in lost.files[0] and len(lost.files) == 1
    assert (lost.unknown > 0) == (
        kind not in ("dropped", "some bytes", "some of the fallback")
    )
    assert describe(tmp_path / "home" / reference.path).inexpressible == lost
    for _ in range(2):  # also where nothing is built
        assert "7.txt" in caplog.text
        caplog.clear()
        preprocess(given, tmp_path / "home")
    report = verify(reference, tmp_path / "home", "deep")
    assert any(
        f"no token for {100 * lost.share:.2g} %" in check.detail
        for check in report.checks
    )


def test_a_unit_of_several_files_is_counted_by_todays_files(data, tmp_path):
    """Units have the names of their texts, whatever files these are in."""
    text = [f"text number {number}, and more of it. " * 40 for number in range(30)]
    text[7] += "日本"
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in text))
    tokenizer = saved(LOSSY["dropped"], tmp_path)
    for files in ([f"{tmp_path}/all.jsonl"], write(tmp_path, "日本")):
        reference = preprocess(
            data(files=files, tokenizer=tokenizer), tmp_path / "home"
        )
    lost = read_dataset(tmp_path / "home" / reference.path).meta.inexpressible
    assert lost.files == (f"{tmp_path}/7.txt: 6 bytes",)


@pytest.mark.parametrize(
    "model",
    [
        models.Unigram(scores(*LETTERS)),
        models.WordPiece(dict(list(ids(*LETTERS).items())), unk_token="[no]"),
    ],
)
def test_a_tokenizer_that_fails_at_a_text_is_refused_with_the_file(
    data, tmp_path, model
):
    given = data(
        files=write(tmp_path, "日本"), tokenizer=saved(Tokenizer(model), tmp_path)
    )
    with pytest.raises(DataError, match=r"7\.txt|0\.txt"):
        preprocess(given, tmp_path / "home")


def fallback(**settings: object) -> Tokenizer:
    return Tokenizer(bpe(*LETTERS, *BYTES, byte_fallback=True, **settings))


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_a_trained_tokenizer_loses_nothing_and_nothing_is_counted(
    data, tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(Losses, "__init__", lambda *_: pytest.fail("counted"))
    tokenizer = train(
        ["the cat, and the dog"] * 9, TokenizerConfig(kind=kind, vocab_size=300)
    )
    assert has_all_bytes(tokenizer) and keeps_text(tokenizer, True)
    reference = preprocess(data(tokenizer={"kind": kind, "vocab_size": 300}), tmp_path)
    assert not list((tmp_path / "units").glob("*/*/lost.npy"))
    assert "hashes of the text" in " ".join(
        check.detail for check in verify(reference, tmp_path, "deep").checks
    )


def test_byte_fallback_and_byte_alphabets_lose_nothing():
    whole = [fallback(), fallback(unk_token="<unk>"), over_bytes(bpe(*ALPHABET))]
    whole.append(
        Tokenizer(models.Unigram(scores(*BYTES), unk_id=1, byte_fallback=True))
    )
    whole.append(
        over_bytes(bpe(*ALPHABET), pre_tokenizers.Split(Regex(r"\d"), "isolated"))
    )
    assert all(map(has_all_bytes, whole)) and not any(
        map(has_all_bytes, LOSSY.values())
    )
    assert [keeps_text(tokenizer, True) for tokenizer in whole] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert not keeps_text(
        over_bytes(bpe(*ALPHABET), pre_tokenizers.WhitespaceSplit()), True
    )
    assert not keeps_text(
        over_bytes(bpe(*ALPHABET), pre_tokenizers.Split(" ", "removed")), True
    )


def test_added_tokens_that_the_decoder_changes_do_not_keep_text():
    """It takes the letter é for the byte E9."""
    tokenizer = over_bytes(bpe(*ALPHABET))
    tokenizer.add_tokens(["cat"])
    assert keeps_text(tokenizer, True)
    tokenizer.add_special_tokens(["<café>"])
    assert keeps_text(tokenizer, True) and not keeps_text(tokenizer, False)
    tokenizer.add_tokens(["café"])
    assert not keeps_text(tokenizer, True)


def test_what_normalizer_pre_tokenizer_and_added_tokens_do_is_no_loss():
    tokenizer = Tokenizer(
        bpe(*(letter for letter in LETTERS if not letter.isupper()), unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(["日本"])
    losses = Losses(encoder_of(tokenizer, True))
    assert losses.of("ＡＢＣ Çafé 日本")[:2] == (2, 4)
    assert losses.of("ABC 日本 x")[:2] == losses.of("")[:2] == (0, 0)


def test_an_unknown_token_stands_for_no_bytes():
    assert token_bytes(
        Tokenizer(models.WordPiece(ids("the"), unk_token="<unk>")), True
    ).tolist() == [
        4,
        0,
        3,
    ]


def test_counting_of_losses_can_be_stopped(tmp_path):
    tokenizer = LOSSY["unknown"]
    recipe = recipe_for(tmp_path, tokenizer, 0, reference_engine(), True)
    documents = Documents(
        [b"one", b"two"], [(File(tmp_path / "x.txt", "x.txt", "text"), 2)], 0.0
    )
    requests = iter([False, False, True])  # of encoding, and of each document's loss
    with pytest.raises(Abandoned):
        write_unit(recipe, documents, lambda: next(requests))
    assert not list(tmp_path.glob("units/*/*/*"))


def test_deep_verification_compares_with_the_text_itself(data, tmp_path):
    reference = preprocess(data(), tmp_path)
    unit = next((tmp_path / "units").glob("*/*/documents.npy"))
    table = np.load(unit)
    table["hash"][:] = 0
    np.save(unit, table)
    reseal(unit.parent)
    with pytest.raises(DataError, match="hashes differ"):
        verify(reference, tmp_path, "deep")
