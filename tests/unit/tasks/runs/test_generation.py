"""Texts as they are written: pieces, stop strings, end of text."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infini_llama.configs.reading import changed
from infini_llama.configs.schema import TrainingConfig
from infini_llama.flows.cli.main import main
from infini_llama.model.config import LlamaConfig
from infini_llama.model.generate import Sampling
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.lineage import Conversation, InitialWeights
from infini_llama.tasks.runs.generation import (
    Writer,
    generate,
    warn_beyond_trained_length,
)
from infini_llama.tasks.runs.load import dataset_of, load_run
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.worker.callbacks.samples import sample_texts

END = 0


@pytest.fixture
def tokenizer():
    """A token a byte, and one that ends a text."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE({"<end>": 0} | {byte: i + 1 for i, byte in enumerate(bytes_)}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    made.decoder = decoders.ByteLevel()
    return made


class Scripted(Llama):
    """Writes given tokens: its logits are those of the script, whatever it reads."""

    def __init__(self, tokenizer, *texts):
        super().__init__(LlamaConfig(300, 8, 8, 1, 1, 1, 8))
        self.script = [[*tokenizer.encode(text).ids, END] for text in texts]
        self.begun = self.step = 0

    def _scores(self):
        logits = torch.zeros(len(self.script), 300)
        for row, tokens in enumerate(self.script):
            logits[row, tokens[min(self.step, len(tokens) - 1)]] = 9.0
        return logits

    def prefill(self, *arguments, **options):
        self.begun += 1
        return self._scores()[self.begun - 1 : self.begun], super().prefill(
            *arguments, **options
        )[1]

    def decode(self, *_arguments):
        self.step += 1
        return self._scores()


def written(tokenizer, texts, stops=(), length=200):
    writer = Writer(
        Scripted(tokenizer, *texts), tokenizer, [[1]] * len(texts), (END,), stops
    )
    pieces = [""] * len(texts)
    for row, piece in writer.write(length, Sampling()):
        assert piece
        pieces[row] += piece
    assert pieces == writer.texts  # what was shown is what stands there
    return writer


def test_a_stop_string_ends_a_text_wherever_tokens_part_it(tokenizer):
    texts = ["one\n\ntwo", "no stop here", "a\nb\n\n", "\n\n"]
    assert written(tokenizer, texts, ("\n\n",)).texts == [
        "one",
        "no stop here",
        "a\nb",
        "",
    ]


def test_the_first_of_several_stop_strings_counts(tokenizer):
    assert written(tokenizer, ["abc STOP def END"], ("END", "STOP")).texts == ["abc "]
    assert written(tokenizer, ["abXYc"], ("XYZ", "XYc")).texts == ["ab"]


def test_text_that_only_starts_like_a_stop_string_is_shown(tokenizer):
    assert written(tokenizer, ["ab STO"], ("STOP",)).texts == ["ab STO"]
    assert written(tokenizer, ["ab STO and more"], ("STOP",), length=6).texts == [
        "ab STO"
    ]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer):
    assert written(tokenizer, ["aé"], length=2).texts == ["a\ufffd"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_without_a_token_are_not_chosen(tokenizer, temperature):
    model = Scripted(tokenizer, "")
    model.script = [[tokenizer.get_vocab_size(), 299] * 10]
    writer = Writer(model, tokenizer, [[1]], (END,))
    list(writer.write(20, Sampling(temperature=temperature)))
    assert all(map(tokenizer.id_to_token, writer.tokens[0]))


def test_text_pieces_are_emitted_as_soon_as_they_are_final(tokenizer):
    writer = Writer(Scripted(tokenizer, "abSTx"), tokenizer, [[1]], (END,), ("STOP",))
    assert [piece for _, piece in writer.write(50, Sampling())] == ["a", "b", "STx"]


def test_a_text_ends_at_each_end_token_of_the_model_that_the_run_began_from(
    run_of, capsys
):
    run = RunFolder(run_of()[0])
    command = [
        "generate",
        str(run.path),
        "--prompt",
        "a",
        "--temperature",
        "0",
        "--max-new-tokens",
        "4",
        "--json",
    ]
    assert main(command) == 0
    (before,) = json.loads(capsys.readouterr().out)["texts"]
    first, *others = before["tokens"]
    ends = tuple(token for token in others if token != first)
    assert ends
    initial = InitialWeights(
        path="theirs",
        digest="",
        vocab_size=0,
        conversation=Conversation(end_tokens=ends),
    )
    run.write(run.lineage, changed(run.require_lineage(), init_from=initial))
    assert main(command) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    assert 0 < len(text["tokens"]) < 4 and set(text["tokens"]) == {first}
    trained = load_run(run.path)
    assert generate(trained, ["a"], 4) == [text["text"]]
    train = TrainingConfig(sample_prompts=["a"], sample_tokens=50)
    every = Conversation(end_tokens=tuple(range(trained.tokenizer.get_vocab_size())))
    texts = [
        sample_texts(trained.model, dataset_of(run.path), train, kept)[0].text
        for kept in (Conversation(), every)
    ]
    assert texts[0] != texts[1] == "a"


def test_control_characters_are_printed_escaped(run_of, capsys):
    run, _ = run_of()
    assert (
        main(["generate", str(run), "--prompt", "a\x1b[31mb", "--max-new-tokens", "2"])
        == 0
    )
    assert (
        main(
            [
                "generate",
                str(run),
                "--prompt",
                "a\x1b[31mb",
                "--prompt",
                "c",
                "--max-new-tokens",
                "2",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert (
        printed.out.count("a\\x1b[31mb") == 2
        and "\x1b" not in printed.out + printed.err
    )


@pytest.mark.parametrize(
    ("given", "code"),
    [(("--prompt", "a\udcff"), 64), (("--max-new-tokens", "1" + "0" * 15), 71)],
)
def test_what_cannot_be_generated_ends_with_its_own_code(run_of, capsys, given, code):
    run, _ = run_of()
    assert main(["generate", str(run), "--prompt", "a", *given]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("attention", "new", "warned"),
    [("softmax", 63, 0), ("softmax", 64, 1), ("local", 64, 0)],
)
def test_full_attention_beyond_its_trained_length_is_one_warning(
    run_of, tokenizer, caplog, attention, new, warned
):
    run, _ = run_of()
    model = Llama(LlamaConfig(300, 8, 8, 1, 1, 1, 64, attention=attention))
    warn_beyond_trained_length(run, Writer(model, tokenizer, [[1], [1]], (END,)), new)
    records = [
        record for record in caplog.records if record.name == "infini_llama.generate"
    ]
    assert [record.message.count("64") for record in records] == [2] * warned
