"""Does a model find a number that it read long before? Retrieval by length and depth, read in pieces in constant state.

After Mohtashami and Jaggi 2023, arXiv 2305.16300, section 4.2, and Munkhdalai et al. 2024, arXiv 2404.07143, table 3. The number is
asked for at the end; it counts as found where every one of its tokens is the likeliest after the right ones before it, which is when
greedy writing would give it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from random import Random

import torch
from tokenizers import Tokenizer

from infini_llama.configs.errors import ConfigError
from infini_llama.model.llama import Llama
from infini_llama.tasks.preprocess.sources.passkey import FILLER, HEAD, HIDDEN, QUESTION, new_key
from infini_llama.tasks.records.evaluation import PasskeyResult

log = logging.getLogger("infini_llama.evaluate")
PIECE = 4096  # tokens that are read at a time


@dataclass(frozen=True)
class Asked:
    """One text with its question, as tokens that are made as they are read, and the answer."""

    parts: tuple[list[int], list[int], int, list[int], int]  # head, filler, times before, hidden, times after
    question: list[int]
    answer: list[int]

    def tokens(self) -> Iterator[int]:
        head, filler, before, hidden, after = self.parts
        return chain(
            head,
            chain.from_iterable(repeat(filler, before)),
            hidden,
            chain.from_iterable(repeat(filler, after)),
            self.question,
        )

    @property
    def length(self) -> int:
        """Tokens from the first to the last of the question."""
        head, filler, before, hidden, after = self.parts
        return len(head) + len(filler) * (before + after) + len(hidden) + len(self.question)

    @property
    def distance(self) -> int:
        """Tokens between the hidden number and the question."""
        return len(self.parts[1]) * self.parts[4]


def ask(tokenizer: Tokenizer, length: int, depth: float, key: str) -> Asked:
    """A text of at most `length` tokens with `key` at `depth` of its filler, 0 at its beginning and 1 at its end.

    Raises:
        ConfigError: the length has no room for the number and the question.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    head, filler, hidden, question, answer = (
        ids(text) for text in (HEAD, FILLER, HIDDEN.format(key=key), QUESTION, f" {key}")
    )
    least = len(head) + len(hidden) + len(question)
    if length < least:
        raise ConfigError(
            f"--lengths or evaluate.passkey_lengths, {length}: the number and the question alone take {least} "
            "tokens; give at least that many."
        )
    count = (length - least) // len(filler)
    before = round(depth * count)
    return Asked((head, filler, before, hidden, count - before), question, answer)


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
    chosen = model.lm_head(hidden)[0].argmax(dim=-1).tolist()
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
            done = {"done": len(found), "total": len(lengths) * len(depths), "unit": "texts"}
            log.info("length %d, depth %g: %.0f %%", length, depth, 100 * result.found, extra={"progress": done})
    return found
