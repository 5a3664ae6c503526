"""One text that is read once for all numbers of a length, against each text read whole: in a small model that has learned its memory."""

import re
from collections.abc import Iterator
from copy import deepcopy
from random import Random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from infini_llama.configs.schema.sources import PasskeyConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, parameter_groups
from infini_llama.model.loss import IGNORE_INDEX
from infini_llama.tasks.evaluate import passkey as module
from infini_llama.tasks.evaluate.passkey import (
    Asked,
    Begun,
    HiddenFacts,
    passkey_after,
    read,
    right_tokens,
)
from infini_llama.tasks.preprocess.sources.passkey import (
    FILLER,
    HEAD,
    HIDDEN,
    QUESTION,
    passkey_texts,
)
from infini_llama.tasks.tokenizers.encoder import TextEncoder

SEGMENT, STEPS, ROWS, FACTS = 32, 1500, 16, 20
# Tokens before the facts; texts of training have at most six segments.
LENGTHS = (
    256,
    1024,
)
WORDS = [
    first + vowel + last for first in "bdfgklmn" for vowel in "aeiou" for last in "lnrs"
]
# Both sides add the same segments' products, in another order and other partial sums, so that they
# agree up to rounding: of fp64 and fp32 sums over 70 segments, through two layers.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of log-probabilities, nats


def words_of(seed: int, count: int) -> list[str]:
    return [f" {word}" for word in Random(seed).choices(WORDS, k=count)]


def encoder() -> TextEncoder:
    """Each word and each digit is a token."""
    text = HEAD + FILLER + HIDDEN.format(key="0123456789") + QUESTION
    tokens = dict.fromkeys(
        ["<|endoftext|>", *re.findall(r"\d|[a-zA-Z]+|[.?]", text), *WORDS]
    )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return TextEncoder(tokenizer, True)


def batches(of: TextEncoder, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of generated texts; the labels are those of the answers alone."""
    settings = PasskeyConfig(documents=count * ROWS, repetitions=6, filler="files")
    rows = []
    for text in passkey_texts(settings, words_of(seed=1, count=20_000)):
        ids = of.encode(text)
        answer = len(of.encode(text[text.rindex(QUESTION) + len(QUESTION) :]))
        labels = torch.tensor(ids)
        labels[:-answer] = IGNORE_INDEX
        rows.append((torch.tensor(ids), labels))
        if len(rows) == ROWS:
            inputs, labels = (
                torch.nn.utils.rnn.pad_sequence(
                    part, batch_first=True, padding_value=padding
                )
                for part, padding in zip(
                    zip(*rows, strict=True), (0, IGNORE_INDEX), strict=True
                )
            )
            yield inputs[:, :-1], labels[:, 1:]
            rows = []


@pytest.fixture(scope="module")
def trained() -> tuple[Llama, TextEncoder]:
    of = encoder()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(
            of.tokenizer.get_vocab_size(),
            64,
            192,
            2,
            2,
            2,
            8 * SEGMENT,
            attention="infini",
            segment_length=SEGMENT,
            initializer_range=0.1,
            tie_word_embeddings=False,
            memory_write_jitter=64.0,
        )
    )
    groups = parameter_groups(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    for step, (inputs, labels) in enumerate(batches(of, STEPS)):
        model.set_write_jitter(64.0 ** min(1.0, max(0.0, 2 * step / STEPS - 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(
                1.0, (step + 1) / 100, (STEPS - step) / (STEPS / 5)
            )
        total, count = model.loss(inputs, labels)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), of


def read_once(model: Llama, begun: Begun) -> torch.Tensor:
    """Log-probabilities [tokens of the answer, vocabulary] after the states of the text."""
    states = deepcopy(begun.states)
    hidden = [read(model, begun.rest, states)[:, -1:]]
    hidden.append(read(model, begun.asked.answer[:-1], states))
    return model.logits(torch.cat(hidden, dim=1))[0].log_softmax(-1)


def read_whole(model: Llama, tokens: list[int], answer: list[int]) -> torch.Tensor:
    """The same by one plain pass over all tokens."""
    logits = model(torch.tensor([[*tokens, *answer[:-1]]]))
    return logits[0, -len(answer) :].log_softmax(-1)


def with_fact_first(asked: Asked) -> list[int]:
    """The same segments, but those of the fact follow the first two: the fact is far back."""
    tokens = list(asked.tokens())
    start = 2 * SEGMENT
    begin = len(asked.head)
    end = begin + -(-(asked.before + len(asked.hidden)) // SEGMENT) * SEGMENT
    return tokens[:start] + tokens[begin:end] + tokens[start:begin] + tokens[end:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_text_that_is_read_once_gives_the_answers_of_each_text_read_whole(
    trained, monkeypatch, dtype
):
    model, of = trained
    model = deepcopy(model).to(dtype)
    begun: list[Begun] = []

    def noted(model: Llama, text: Begun) -> list[bool]:
        if model.uses_memory():
            begun.append(text)
        return right_tokens(model, text)

    monkeypatch.setattr(module, "right_tokens", noted)
    book = of.encode("".join(words_of(seed=2, count=4000)))
    results = passkey_after(model, of, LENGTHS, HiddenFacts("passkey", FACTS, 0), book)
    assert len(begun) == FACTS * len(LENGTHS)
    for number, cell in enumerate(results):
        assert (
            cell["memory"].right_tokens > 0.6 and cell["no_memory"].right_tokens < 0.4
        )
        right_if_first = 0
        for text in begun[number * FACTS : (number + 1) * FACTS]:
            answer = torch.tensor(text.asked.answer)
            once = read_once(model, text)
            whole = read_whole(model, list(text.asked.tokens()), text.asked.answer)
            assert (once - whole).abs().max() < TOLERANCE[dtype]
            best = whole.topk(2).values
            is_clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE[dtype]
            right = torch.tensor(right_tokens(model, text))
            assert torch.equal(right[is_clear], (whole.argmax(-1) == answer)[is_clear])
            first = read_whole(model, with_fact_first(text.asked), text.asked.answer)
            right_if_first += int((first.argmax(-1) == answer).sum())
        # Only near: the upper memory's keys and values follow from what the lower one held.
        share = right_if_first / (FACTS * len(answer))
        assert abs(share - cell["memory"].right_tokens) < 0.05
