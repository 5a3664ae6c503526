"""Does a model find what it read long before? Retrieval by length and depth, or by segment ends, read in pieces in constant state.

After Mohtashami and Jaggi 2023, arXiv 2305.16300, section 4.2, and Munkhdalai et al. 2024, arXiv 2404.07143, table 3. The number is
asked for at the end; it counts as found where every one of its tokens is the likeliest after the right ones before it, which is when
greedy writing would give it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from random import Random

import torch
from tokenizers import Tokenizer

from infini_llama.configs.errors import ConfigError
from infini_llama.model.llama import Llama
from infini_llama.tasks.preprocess.sources.passkey import FILLER, FORMS, HEAD, HIDDEN, QUESTION, Hidden, new_key
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.evaluation import PasskeyResult

log = logging.getLogger("infini_llama.evaluate")
PIECE = 4096  # tokens that are read at a time


@dataclass(frozen=True)
class Asked:
    """One text with its question, as tokens that are made as they are read, and the answer."""

    parts: tuple[
        list[int], list[int], int, list[int], int
    ]  # head, filler, tokens of it before, hidden, tokens of it after
    question: list[int]
    answer: list[int]

    def tokens(self) -> Iterator[int]:
        head, filler, before, hidden, after = self.parts
        rest = before % len(filler)  # the filler goes on where what is hidden interrupts it
        later = islice(cycle([*filler[rest:], *filler[:rest]]), after)
        return chain(head, islice(cycle(filler), before), hidden, later, self.question)

    @property
    def length(self) -> int:
        """Tokens from the first to the last of the question."""
        head, _, before, hidden, after = self.parts
        return len(head) + before + len(hidden) + after + len(self.question)

    @property
    def distance(self) -> int:
        """Tokens between the hidden number and the question."""
        return self.parts[4]


def ask(tokenizer: Tokenizer, length: int, depth: float, key: str) -> Asked:
    """A text of at most `length` tokens with `key` at `depth` of its filler, 0 at its beginning and 1 at its end.

    Raises:
        ConfigError: the length has no room for the number and the question.
    """

    statement = Hidden(HIDDEN.format(key=key), QUESTION, key)
    head, hidden, question, answer = encoded(tokenizer, statement)
    filler = tokenizer.encode(FILLER, add_special_tokens=False).ids
    least = len(head) + len(hidden) + len(question)
    if length < least:
        raise ConfigError(
            f"--lengths or evaluate.passkey_lengths, {length}: the number and the question alone take {least} "
            "tokens; give at least that many."
        )
    count = (length - least) // len(filler)
    before = round(depth * count)
    return Asked((head, filler, before * len(filler), hidden, (count - before) * len(filler)), question, answer)


def encoded(tokenizer: Tokenizer, hidden: Hidden) -> list[list[int]]:
    """What is before the filler, what is hidden in it, question and answer, as tokens."""
    texts = (HEAD + "".join(hidden.others), hidden.statement, hidden.question, f" {hidden.answer}")
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def ask_across(
    tokenizer: Tokenizer, segment_length: int, ends: int, statement: Hidden, random: Random, filler: list[int]
) -> Asked:
    """A text in which every token of the answer is predicted `ends` segment ends behind its last mention.

    That mention stands whole in one segment, and all tokens from which the answer is predicted in another. Other mentions, and what
    else is hidden, are at least as far. The filler's tokens are repeated as often as needed, from a random one on, and cut anywhere.

    Raises:
        ConfigError: a segment is too short for the answer, or the question alone crosses more ends.
    """
    head, hidden, question, answer = encoded(tokenizer, statement)
    begin = random.randrange(len(filler))
    filler = [*filler[begin:], *filler[:begin]]
    size, given = len(answer), len(answer) - 1
    last = next((at for at in range(len(hidden) - size, -1, -1) if hidden[at : at + size] == answer), None)
    if last is None or size > segment_length:
        raise ConfigError(
            f"--segments: the answer's {size} tokens do not fit into segments of {segment_length}, or this tokenizer joins them to other "
            "text; use a tokenizer whose digits stay single and longer segments."
        )
    before = random.randrange(2 * segment_length)
    while (len(head) + before + last) % segment_length > segment_length - size:
        before += 1
    # Without more filler, the answer's first token is predicted from `start`.
    start = len(head) + before + len(hidden) + len(question) - 1
    target = (len(head) + before + last) // segment_length + ends
    first = max(start, target * segment_length)
    if first + given >= (target + 1) * segment_length:
        raise ConfigError(
            f"--segments {ends}: the text between number and answer alone crosses more ends of segments of {segment_length} tokens; "
            "give more segments."
        )
    after = random.randint(first, (target + 1) * segment_length - 1 - given) - start
    return Asked((head, filler, before, hidden, after), question, answer)


@torch.inference_mode()
def right_tokens(model: Llama, asked: Asked) -> list[bool]:
    """For each token of the answer whether it is the likeliest one, after the right ones before it."""
    device = model.lm_head.weight.device
    given, tokens = asked.answer[:-1], asked.tokens()
    states = model.new_states(1, capacity=asked.length + len(given))
    hidden = torch.zeros(0)
    while piece := list(islice(tokens, PIECE)):
        hidden = model.read(torch.tensor([piece], device=device), states)[:, -1:]
    if given:
        hidden = torch.cat((hidden, model.read(torch.tensor([given], device=device), states)), dim=1)
    chosen = model.logits(hidden)[0].argmax(dim=-1).tolist()
    return [token == right for token, right in zip(chosen, asked.answer, strict=True)]


def passkey(
    model: Llama, tokenizer: Tokenizer, lengths: list[int], depths: list[float], samples: int, seed: int = 0
) -> list[PasskeyResult]:
    """Retrieval at every length and depth, over `samples` numbers each, the same ones for every model.

    Raises:
        ConfigError: a length is too short.
    """
    found = []
    for length in lengths:
        for depth in depths:
            random = Random(f"{seed}-{length}-{depth}")
            texts = [ask(tokenizer, length, depth, new_key(random)) for _ in range(samples)]
            answers = [right_tokens(model, asked) for asked in texts]
            tokens = [right for answer in answers for right in answer]
            distance = max(asked.distance for asked in texts)
            has_segments = model.config.attention != "softmax"
            result = PasskeyResult(
                length=length,
                tokens=max(asked.length for asked in texts),
                depth=depth,
                distance=distance,
                segments=-(-distance // model.config.segment_length) if has_segments else None,
                found=sum(map(all, answers)) / samples,
                right_tokens=sum(tokens) / len(tokens),
            )
            found.append(result)
            done = Reached(len(found), len(lengths) * len(depths), "texts")
            log.info("length %d, depth %g: %.0f %%", length, depth, 100 * result.found, extra={"progress": done})
    return found


def passkey_across(
    model: Llama, tokenizer: Tokenizer, ends: list[int], samples: int, form: str, filler: list[int], seed: int = 0
) -> list[PasskeyResult]:
    """Retrieval over so many segment ends, by token of the answer and as a whole, over `samples` texts each.

    Args:
        form: of `FORMS`.
        filler: tokens of the text around what is hidden.

    Raises:
        ConfigError: as `ask_across`.
    """
    found = []
    for count in ends:
        random = Random(f"{seed}-{count}")
        size = model.config.segment_length
        texts = [ask_across(tokenizer, size, count, FORMS[form](random), random, filler) for _ in range(samples)]
        answers = [right_tokens(model, asked) for asked in texts]
        by_token = [sum(column) / samples for column in zip(*answers, strict=True)]
        result = PasskeyResult(
            length=max(asked.length for asked in texts),
            tokens=max(asked.length for asked in texts),
            depth=0.0,
            distance=max(asked.distance for asked in texts),
            segments=count,
            found=sum(map(all, answers)) / samples,
            right_tokens=sum(by_token) / len(by_token),
            right_by_token=tuple(by_token),
        )
        found.append(result)
        done = Reached(len(found), len(ends), "distances")
        log.info("%d segment ends: %.0f %%", count, 100 * result.found, extra={"progress": done})
    return found
