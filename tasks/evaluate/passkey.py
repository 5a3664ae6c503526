"""Passkey retrieval: whether a model finds what it read long before, in constant memory.

It is measured by length and depth, or by segment boundaries, after Mohtashami and Jaggi 2023, arXiv
2305.16300, section 4.2, and Munkhdalai et al. 2024, arXiv 2404.07143, table 3. The number is asked
for at the end; it counts as found where every one of its tokens is the likeliest after the right
ones before it, which is when greedy decoding would give it. For a model with a memory, `controls`
say whether the memory holds the number.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, zip_longest
from random import Random
from typing import TypeVar

import torch

from infini_llama.configs.errors import ConfigError
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import PIECE, Llama, States
from infini_llama.model.segment_states import InfiniState
from infini_llama.tasks.preprocess.sources.passkey import (
    DIGITS,
    FILLER,
    FORMS,
    HIDDEN,
    QUESTION,
    Hidden,
    new_key,
)
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.evaluation import MemoryControls, PasskeyResult
from infini_llama.tasks.tokenizers.encoder import TextEncoder

log = logging.getLogger("infini_llama.evaluate")
KNOWN_SEGMENTS = 4096  # different ones, whose outputs below the memory are kept
# Segment boundaries between what is hidden after a long text and its answer.
BOUNDARIES_AFTER = 8
Result = TypeVar("Result")


@dataclass(frozen=True)
class HiddenFacts:
    """Facts of a measurement: `samples` of them per length or distance, of a form of `FORMS`."""

    form: str
    samples: int
    seed: int


@dataclass(frozen=True)
class Asked:
    """One text with its question, as tokens that are made as they are read, and the answer.

    Attributes:
        before, after: tokens of filler before and after what is hidden.
        vocab_size: of the tokenizer: a model may have more rows, whose IDs have no token.
    """

    head: list[int]
    filler: list[int]
    before: int
    hidden: list[int]
    after: int
    question: list[int]
    answer: list[int]
    vocab_size: int

    def tokens(self) -> Iterator[int]:
        """All tokens from the first to the last of the question."""
        earlier = islice(cycle(self.filler), self.before)
        # The filler continues where what is hidden interrupts it.
        rest = self.before % len(self.filler)
        later = islice(cycle(self.filler), rest, rest + self.after)
        return chain(self.head, earlier, self.hidden, later, self.question)

    @property
    def length(self) -> int:
        """Tokens from the first to the last of the question."""
        return (
            len(self.head)
            + self.before
            + len(self.hidden)
            + self.after
            + len(self.question)
        )

    @property
    def without_hidden(self) -> "Asked":
        """The same with filler in place of what is hidden."""
        return replace(self, hidden=[], after=len(self.hidden) + self.after)

    def refuse_repetition(self, option: str, advice: str) -> None:
        """Raise ConfigError if the filler repeats, here or in `without_hidden`.

        Args:
            option: where the filler is from.
            advice: what to change.
        """
        count = self.before + len(self.hidden) + self.after
        if count > len(self.filler):
            raise ConfigError(
                f"{option}: {count:,} tokens are needed around the number, and only "
                f"{len(self.filler):,} are left, which would repeat; {advice}."
            )

    def boundaries(self, segment_length: int) -> int:
        """Segment boundaries between the last mention and the answer.

        They are counted from the mention's last token to the token from which the answer is
        predicted.
        """
        mention = last_mention(self.hidden, self.answer) or 0
        end = len(self.head) + self.before + mention + len(self.answer) - 1
        return (self.length - 1) // segment_length - end // segment_length


def last_mention(hidden: list[int], answer: list[int]) -> int | None:
    """The place in `hidden` at which the answer begins for the last time."""
    places = range(len(hidden) - len(answer), -1, -1)
    return next((at for at in places if hidden[at : at + len(answer)] == answer), None)


def ask(
    encoder: TextEncoder,
    length: int,
    depth: float,
    key: str,
) -> Asked:
    """A text of at most `length` tokens with a hidden number.

    Args:
        depth: place of the number in the filler, 0 at its beginning and 1 at its end.
        key: the number.

    Raises:
        ConfigError: the length has no room for the number and the question.
    """
    statement = Hidden(HIDDEN.format(key=key), QUESTION, key)
    head, hidden, question, answer = encoded(encoder, statement)
    filler = in_text(encoder, FILLER)
    least = len(head) + len(hidden) + len(question)
    if length < least:
        raise ConfigError(
            f"--lengths or evaluate.passkey_lengths, {length}: the number and the question alone "
            f"take {least} tokens; give at least that many."
        )
    count = (length - least) // len(filler)
    before = round(depth * count)
    after = (count - before) * len(filler)
    return Asked(
        head=head,
        filler=filler,
        before=before * len(filler),
        hidden=hidden,
        after=after,
        question=question,
        answer=answer,
        vocab_size=encoder.tokenizer.get_vocab_size(),
    )


def least_length(encoder: TextEncoder) -> int:
    """Tokens in which `ask` has room for any number."""
    key = "1" * DIGITS
    parts = encoded(encoder, Hidden(HIDDEN.format(key=key), QUESTION, key))
    # Another number may have a token per digit, and is mentioned twice.
    return sum(map(len, parts[:3])) + 2 * (DIGITS - 1)


def encoded(encoder: TextEncoder, hidden: Hidden) -> list[list[int]]:
    """The parts of a text as tokens: before the filler, hidden in it, question and answer."""
    return [
        in_text(encoder, hidden.head + "".join(hidden.others), ""),
        in_text(encoder, hidden.statement),
        in_text(encoder, hidden.question),
        in_text(encoder, f" {hidden.answer}", hidden.question),
    ]


def in_text(encoder: TextEncoder, text: str, before: str = FILLER) -> list[int]:
    """Tokens of a text that follows another one.

    Llama 2's tokenizer, for example, puts a space before what it encodes.
    """
    first = encoder.encode(before)
    both = encoder.encode(before + text)
    return both[len(first) :] if both[: len(first)] == first else encoder.encode(text)


def ask_across(
    encoder: TextEncoder,
    segment_length: int,
    ends: int,
    statement: Hidden,
    random: Random,
    filler: list[int],
    text: list[int] | None = None,
) -> Asked:
    """A text whose answer is predicted `ends` segment boundaries after its last mention.

    That holds for every token of the answer. The mention stands whole in one segment, and all
    tokens from which the answer is predicted in another. Other mentions, and what else is hidden,
    are at least as far. The filler repeats from a random one of its tokens on, and is cut anywhere.

    Args:
        text: whole segments before everything else, which the filler continues; None: the
            head of the form.

    Raises:
        ConfigError: a segment is too short for the answer, or the question alone crosses more ends.
    """
    head, hidden, question, answer = encoded(encoder, statement)
    if text is None:
        offset = random.randrange(len(filler))
        filler = [*filler[offset:], *filler[:offset]]
    else:
        head = text
        hidden = [*in_text(encoder, "".join(statement.others)), *hidden]
    size = len(answer)
    last = last_mention(hidden, answer)
    if last is None or size > segment_length:
        raise ConfigError(
            f"--segments: the answer's {size} tokens do not fit into segments of {segment_length}, "
            "or this tokenizer joins them to other text; "
            "use a tokenizer whose digits stay single and longer segments."
        )
    somewhere = random.randrange(2 * segment_length)
    for before in range(somewhere, somewhere + segment_length):
        place = len(head) + before + last
        # Without more filler, the answer's first token is predicted from `start`.
        start = len(head) + before + len(hidden) + len(question) - 1
        target = place // segment_length + ends
        first = max(start, target * segment_length)
        final = (target + 1) * segment_length - size
        if place % segment_length <= segment_length - size and first <= final:
            return Asked(
                head=head,
                filler=filler,
                before=before,
                hidden=hidden,
                after=random.randint(first, final) - start,
                question=question,
                answer=answer,
                vocab_size=encoder.tokenizer.get_vocab_size(),
            )
    raise ConfigError(
        f"--segments {ends}: the text between number and answer alone crosses more boundaries "
        f"of segments of {segment_length} tokens; give more boundaries."
    )


@dataclass(frozen=True)
class Begun:
    """A text that was read up to the segment of the question's last token.

    Attributes:
        states: after the segments before.
        rest: the tokens of that segment, which has read nothing of the others but M, z and what
            attend_previous_segment keeps; of softmax attention the last token.
    """

    asked: Asked
    states: States
    rest: list[int]


@torch.inference_mode()
def begin(model: Llama, asked: Asked, after_head: States | None = None) -> Begun:
    """Read all but the segment that the answer is predicted from.

    Args:
        after_head: states after the text's head, which are copied; None: the head is read.
    """
    size = 1 if model.config.attention == "softmax" else model.config.segment_length
    first = (asked.length - 1) // size * size
    tokens = asked.tokens()
    states = model.new_states(1, capacity=asked.length + len(asked.answer))
    if after_head is not None:
        states = deepcopy(after_head)
        behind = len(asked.head)
        remember(model, islice(tokens, behind, first), states)
    elif model.config.attention == "softmax":
        for start in range(0, first, PIECE):
            read(model, list(islice(tokens, min(PIECE, first - start))), states)
    else:
        unseen = model.unseen_segments(first // size)
        remember(model, islice(tokens, unseen.start * size), states)
        # Nothing of these reaches the last segment.
        list(islice(tokens, len(unseen) * size))
        remember(model, islice(tokens, first - unseen.stop * size), states)
    return Begun(asked, states, list(tokens))


@torch.inference_mode()
def remember(model: Llama, tokens: Iterator[int], states: States) -> None:
    """Read whole segments into a model's memory, and what else it keeps of them.

    Of segments that are equal, layers below the first memory are computed once.
    """
    size = model.config.segment_length
    known: dict[tuple[int, ...], torch.Tensor] = {}
    segments = iter(lambda: tuple(islice(tokens, size)), ())
    while piece := list(islice(segments, max(1, PIECE // size))):
        new = [segment for segment in dict.fromkeys(piece) if segment not in known]
        if new:
            if len(known) + len(new) > KNOWN_SEGMENTS:
                known.clear()
                new = list(dict.fromkeys(piece))
            outputs = model.below_memory(
                torch.tensor(new, device=model.lm_head.weight.device)
            )
            known.update(zip(new, outputs, strict=True))
        model.remember(torch.cat([known[segment] for segment in piece])[None], states)


def with_and_without_memory(
    model: Llama, measure: Callable[[bool], Result]
) -> dict[str, Result]:
    """{"model": …}, or for a model with a memory {"memory": …, "no_memory": …}.

    Args:
        measure: takes whether the memory is used.
    """
    if not model.uses_memory():
        return {"model": measure(False)}
    results = {"memory": measure(True)}
    model.use_memory(False)
    try:
        return results | {"no_memory": measure(False)}
    finally:
        model.use_memory(True)


def read(model: Llama, tokens: list[int], states: States) -> torch.Tensor:
    """Hidden states of the tokens, [1, t, hidden_size], which the head reads."""
    return model.read(
        torch.tensor([tokens], device=model.lm_head.weight.device), states
    )


@torch.inference_mode()
def right_tokens(model: Llama, begun: Begun) -> list[bool]:
    """Whether each token of the answer is the likeliest one, after the right ones before it."""
    states = deepcopy(begun.states)
    before_last = begun.asked.answer[:-1]
    hidden = read(model, begun.rest, states)[:, -1:]
    if before_last:
        hidden = torch.cat((hidden, read(model, before_last, states)), dim=1)
    logits = model.logits(hidden)[0, :, : begun.asked.vocab_size]
    chosen = logits.argmax(dim=-1).tolist()
    return [
        token == right for token, right in zip(chosen, begun.asked.answer, strict=True)
    ]


@torch.inference_mode()
def greedy_tokens(
    model: Llama,
    rest: list[int],
    states: States,
    count: int,
    vocab_size: int,
) -> list[int]:
    """`count` tokens of greedy decoding after `rest`, with IDs below `vocab_size`."""
    states = deepcopy(states)
    written: list[int] = []
    for _ in range(count):
        hidden = read(model, [written[-1]] if written else rest, states)[:, -1]
        written.append(int(model.logits(hidden)[0, :vocab_size].argmax()))
    return written


def with_memory_of(states: States, others: States) -> States:
    """The states with the memory of others.

    M and z alone are exchanged: what a segment sees of the one before it stays.
    """
    exchanged = deepcopy(states)
    for state, other in zip(exchanged.layers, others.layers, strict=True):
        if isinstance(state, InfiniState) and isinstance(other, InfiniState):
            state.memory = other.memory
            state.written = other.written
    return exchanged


def least_boundaries(config: LlamaConfig) -> int:
    """Fewest segment boundaries that only a memory carries a fact across.

    With attend_previous_segment each layer also carries it across one.
    """
    return config.num_hidden_layers + 1 if config.sees_previous_segment else 1


@torch.inference_mode()
def controls(
    model: Llama,
    texts: list[Begun],
    after_head: States | None = None,
) -> MemoryControls:
    """Whether it is M and z that hold the number.

    Each text's last segment is read with the memory of another text, and of filler alone. Numbers
    that the two texts have in common are not counted.

    Args:
        after_head: of all texts, see `begin`.
    """
    own_text = other_text = pairs = filler = 0
    empty = begin(model, texts[0].asked.without_hidden, after_head).states
    for mine, theirs in zip(texts, [*texts[1:], texts[0]], strict=True):
        answer = mine.asked.answer
        others = theirs.asked.answer
        vocab_size = mine.asked.vocab_size
        of_filler = with_memory_of(mine.states, empty)
        after_filler = greedy_tokens(
            model, mine.rest, of_filler, len(answer), vocab_size
        )
        filler += after_filler == answer
        if len(answer) == len(others) and answer != others:
            of_other = with_memory_of(mine.states, theirs.states)
            written = greedy_tokens(model, mine.rest, of_other, len(answer), vocab_size)
            pairs += 1
            own_text += written == answer
            other_text += written == others
    return MemoryControls(
        swapped_own=own_text / pairs if pairs else None,
        swapped_other=other_text / pairs if pairs else None,
        filler_alone=filler / len(texts),
    )


def _measured(
    model: Llama,
    texts: list[Asked],
    length: int,
    depth: float | None,
    after_head: States | None = None,
) -> dict[str, PasskeyResult]:
    """Retrieval by a model, by name as `with_and_without_memory` returns it.

    Args:
        after_head: states of a model with a memory after the head that all texts share.
    """
    of_texts = [asked.boundaries(model.config.segment_length) for asked in texts]
    # Full attention has none, but where they were requested, as beside a model with a memory.
    has_boundaries = depth is None or model.config.attention != "softmax"
    # Nearer facts are also seen without the memory.
    is_controlled = not model.config.sees_previous_segment
    is_controlled |= min(of_texts) >= least_boundaries(model.config)

    def result(with_memory: bool) -> PasskeyResult:
        begun = [
            begin(model, asked, after_head if with_memory else None) for asked in texts
        ]
        answers = [right_tokens(model, text) for text in begun]
        tokens = [right for answer in answers for right in answer]
        columns = zip_longest(*answers, fillvalue=False)
        return PasskeyResult(
            length=length,
            tokens=max(asked.length for asked in texts),
            depth=depth,
            distance=max(asked.after for asked in texts),
            boundaries=max(of_texts) if has_boundaries else None,
            found=sum(map(all, answers)) / len(texts),
            right_tokens=sum(tokens) / len(tokens),
            right_by_token=tuple(sum(column) / len(texts) for column in columns),
            controls=controls(model, begun, after_head)
            if with_memory and is_controlled
            else None,
        )

    return with_and_without_memory(model, result)


def passkey(
    model: Llama,
    encoder: TextEncoder,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int = 0,
) -> list[dict[str, PasskeyResult]]:
    """Retrieval at every length and depth, over `samples` numbers each.

    The numbers are the same ones for every model.

    Raises:
        ConfigError: a length is too short.
    """
    results: list[dict[str, PasskeyResult]] = []
    for length in lengths:
        for depth in depths:
            random = Random(f"{seed}-{length}-{depth}")
            texts = [
                ask(encoder, length, depth, new_key(random)) for _ in range(samples)
            ]
            results.append(_measured(model, texts, length, depth))
            _log(
                f"length {length}, depth {depth:g}", results, len(lengths) * len(depths)
            )
    return results


def passkey_across(
    model: Llama,
    encoder: TextEncoder,
    ends: list[int],
    facts: HiddenFacts,
    filler: list[int],
    may_repeat: bool = True,
) -> list[dict[str, PasskeyResult]]:
    """Retrieval over so many segment boundaries, each fact in a text of its own.

    Args:
        filler: tokens of the text around what is hidden.
        may_repeat: whether a text may have a token of the filler twice.

    Raises:
        ConfigError: as `ask_across`, or the filler repeats and must not.
    """
    results: list[dict[str, PasskeyResult]] = []
    size = model.config.segment_length
    for count in ends:
        random = Random(f"{facts.seed}-{count}")
        texts = [
            ask_across(encoder, size, count, FORMS[facts.form](random), random, filler)
            for _ in range(facts.samples)
        ]
        if not may_repeat:
            for asked in texts:
                asked.refuse_repetition(
                    "--filler text", "give fewer --segments, or another filler"
                )
        length = max(asked.length for asked in texts)
        results.append(_measured(model, texts, length, None))
        _log(f"{count} segment boundaries", results, len(ends))
    return results


def refuse_other_updates(config: LlamaConfig) -> None:
    """Raise ConfigError unless the model's memory is a sum, as `passkey_after` needs it."""
    if config.attention != "infini" or config.memory_update != "linear":
        update = config.memory_update if config.attention == "infini" else "no memory"
        raise ConfigError(
            "--files with --passkey reads one text once for all numbers, which needs "
            f"memory_update: linear, and this run has {update}; use --segments with --filler text."
        )


def ask_after(
    encoder: TextEncoder,
    segment_length: int,
    ends: int,
    lengths: Sequence[int],
    facts: HiddenFacts,
    text: list[int],
) -> dict[int, list[Asked]]:
    """Texts by length, in ascending order: so many of the first tokens of a text are before each.

    Args:
        ends: as in `ask_across`.
        text: tokens.

    Raises:
        ConfigError: as `ask_across`, or the text is too short.
    """
    form = FORMS[facts.form]
    text = [*in_text(encoder, form(Random(0)).head, ""), *text]
    texts_by_length: dict[int, list[Asked]] = {}
    for length in sorted(lengths):
        random = Random(f"{facts.seed}-{length}")
        first = length // segment_length * segment_length
        head = text[:first]
        filler = text[first:]
        texts_by_length[length] = [
            ask_across(
                encoder, segment_length, ends, form(random), random, filler, head
            )
            for _ in range(facts.samples)
        ]
        for asked in texts_by_length[length]:
            asked.refuse_repetition(
                f"--files, length {length:,}", "give more text, or shorter --lengths"
            )
    return texts_by_length


def passkey_after(
    model: Llama,
    encoder: TextEncoder,
    lengths: Sequence[int],
    facts: HiddenFacts,
    text: list[int],
) -> list[dict[str, PasskeyResult]]:
    """Retrieval of facts that follow the first tokens of a text, which is read once.

    The linear update adds (eq. 8), so what was read before a fact weighs as much in the memory as
    what is read after it. The states after `length` tokens therefore serve all facts of that
    length: each continues from a copy, with the fact, more of the text and the question.

    Args:
        text: tokens.

    Raises:
        ConfigError: as `ask_after`.
    """
    size = model.config.segment_length
    ends = max(BOUNDARIES_AFTER, least_boundaries(model.config))
    texts_by_length = ask_after(encoder, size, ends, lengths, facts, text)
    log.info(
        "the text is read once for all numbers, as the memory's linear update adds"
    )
    results: list[dict[str, PasskeyResult]] = []
    states = model.new_states(1, capacity=0)
    behind = 0
    for length, texts in texts_by_length.items():
        head = texts[0].head
        remember(model, iter(head[behind:]), states)
        behind = len(head)
        results.append(_measured(model, texts, length, 1.0, states))
        _log(f"length {length}", results, len(texts_by_length))
    return results


def _log(words: str, results: list[dict[str, PasskeyResult]], count: int) -> None:
    share = next(iter(results[-1].values())).found
    reached = Reached(len(results), count, "cells")
    log.info("%s: %.0f %%", words, 100 * share, extra={"progress": reached})
