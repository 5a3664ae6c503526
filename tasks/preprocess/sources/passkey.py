"""Texts with something hidden in filler and a question for it at the end.

They follow Mohtashami and Jaggi 2023 (arXiv 2305.16300, section 4.2). They are made, not read: the
same settings give the same texts, for training (data.source: passkey) and for `evaluate --passkey`.
The forms `facts`, `variables` and `overwritten` are tasks of RULER (Hsieh et al. 2024, arXiv
2404.06654) in other words: several keys, variables, a value that changes. `niah_single` has its
words, too. `sentences` is there to be trained on, so that a fact is found in more than one wording.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from xxhash import xxh3_128_digest

from infini_llama.configs.errors import no_space
from infini_llama.configs.schema.sources import PasskeyConfig
from infini_llama.tasks.preprocess.sources.files import (
    File,
    matching,
    without_files,
)
from infini_llama.tasks.preprocess.sources.held_out import is_held_out
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.source import Inputs, Source, TextInput
from infini_llama.tasks.preprocess.sources.texts import (
    Batch,
    Fault,
    Span,
    Stamp,
    TextRecords,
    Unreadable,
    in_batches,
)

HEAD = "There is an important number hidden in a lot of other text. Find it and remember it."
FILLER = (
    " The grass is green. The sky is blue. The sun is yellow."
    " Here we go. There and back again."
)
HIDDEN = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
DIGITS = 5
# Of the texts: a change of what is below for the same settings is another one.
MADE_VERSION = 2
MADE_FROM_FILES_VERSION = 4
NAMES = ("cat", "dog", "horse", "house", "tree", "river", "stone", "bread")
# Of form `sentences`. Nothing of `niah_single` is among them, so that it measures
# what was not trained.
THINGS = (
    *NAMES,
    *("garden", "bridge", "letter", "window", "engine", "forest", "castle", "market"),
    *("ship", "school", "island", "winter", "doctor", "painter", "hammer", "basket"),
)
SUBJECTS = (
    "the pass key",
    "the number of the {thing}",
    "the code of the {thing}",
    "the price of the {thing}",
    "the number on the {thing}",
    "the weight of the {thing}",
)
# The number is last: a token is remembered with what was read before it.
SENTENCES = (
    "{Subject} is {key}.",
    "Remember that {subject} is {key}.",
    "It is known that {subject} is {key}.",
    "As {subject} they wrote down {key}.",
    "If they ask for {subject}, say {key}.",
)
# Of form `niah_single`.
ADJECTIVES = (
    *("quiet", "hollow", "amber", "gentle", "rusty", "curious"),
    *("polite", "jagged", "sturdy", "humble", "silver", "narrow"),
)
NOUNS = (
    *("compost", "lantern", "orchid", "saddle", "turnip", "violin"),
    *("walrus", "blanket", "canyon", "pepper", "anchor", "meadow"),
)
WORDS = FILLER.replace(".", "").lower().split()
FILLER_CHARACTERS = 8 * 2**20  # of text that filler `files` is cut from
# Characters, if it has them; of more files than that allows, some are drawn.
LEAST_OF_FILE = 2**16


def new_key(random: Random) -> str:
    return str(random.randrange(10 ** (DIGITS - 1), 10**DIGITS))


@dataclass(frozen=True)
class Hidden:
    """A hidden fact of one text. All questions of a form end with the same words.

    Attributes:
        statement: has the answer.
        head: before everything else, the same for all facts of a form.
        others: what else is hidden.
        is_last: the others are before it; else on both sides, so that its place does not give it
            away.
    """

    statement: str
    question: str
    answer: str
    head: str = HEAD
    others: tuple[str, ...] = ()
    is_last: bool = True


def passkey(random: Random) -> Hidden:
    """One number, said twice."""
    key = new_key(random)
    return Hidden(HIDDEN.format(key=key), QUESTION, key)


def facts(random: Random) -> Hidden:
    """Three things with a number each; one of them is asked for."""
    others = [
        f" The number of the {name} is {new_key(random)}."
        for name in random.sample(NAMES, 3)
    ]
    asked = others.pop(random.randrange(len(others)))
    words = asked.split()
    name = words[4]
    return Hidden(
        statement=asked,
        question=f" What is the number of the {name}? It is",
        answer=words[-1].rstrip("."),
        others=tuple(others),
        is_last=False,
    )


def overwritten(random: Random) -> Hidden:
    """A number that is replaced by another; the later one is asked for."""
    old = new_key(random)
    new = new_key(random)
    return Hidden(
        statement=f" The pass key has changed. The pass key is now {new}.",
        question=" What is the pass key now? It is",
        answer=new,
        others=(f" The pass key is {old}.",),
    )


def variables(random: Random) -> Hidden:
    """A number through two assignments."""
    key = new_key(random)
    first, second, third = random.sample(NAMES, 3)
    return Hidden(
        statement=(
            f" The {first} is {key}. The {second} equals the {first}."
            f" The {third} equals the {second}."
        ),
        question=f" What is the {third}? It is",
        answer=key,
    )


def sentences(random: Random) -> Hidden:
    """The number of a thing, said once, in one of several sentences."""
    subject = random.choice(SUBJECTS).format(thing=random.choice(THINGS))
    key = new_key(random)
    capitalized = subject[0].upper() + subject[1:]
    sentence = random.choice(SENTENCES)
    return Hidden(
        statement=" " + sentence.format(subject=subject, Subject=capitalized, key=key),
        question=f" What is {subject}? It is",
        answer=key,
    )


def niah_single(random: Random) -> Hidden:
    """RULER's first needle in a haystack, in its words.

    Its haystack is FILLER, its key two words, its value a number of seven digits.
    """
    key = f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"
    value = str(random.randrange(10**6, 10**7))
    return Hidden(
        statement=f" One of the special magic numbers for {key} is: {value}.",
        question=(
            f"\nWhat is the special magic number for {key} mentioned in the provided text?"
            f" The special magic number for {key} mentioned in the provided text is"
        ),
        answer=value,
        head=(
            "A special magic number is hidden within the following text. Make sure to memorize it."
            " I will quiz you about the number afterwards.\n"
        ),
    )


FORMS: dict[str, Callable[[Random], Hidden]] = {
    "passkey": passkey,
    "facts": facts,
    "overwritten": overwritten,
    "variables": variables,
    "sentences": sentences,
    "niah_single": niah_single,
}


def random_words(random: Random) -> str:
    """Words in random order, as many as `FILLER` has."""
    return f" {' '.join(random.choices(WORDS, k=len(WORDS)))}."


def cut_anywhere(
    filler: str,
    count: int,
    random: Random,
    prose: Sequence[str] = (),
) -> list[str]:
    """Consecutive words, from a random one on, each with the whitespace before it.

    Args:
        filler: repeated (`FILLER`), random, or files (`prose`).
        count: how many words.
        prose: words of other text, each with the whitespace before it.
    """
    if filler == "files":
        first = random.randrange(len(prose))
        return [prose[number % len(prose)] for number in range(first, first + count)]
    first = random.randrange(len(WORDS))
    words = list[str]()
    while len(words) < first + count:
        words += (FILLER if filler == "repeated" else random_words(random)).split()
    return [f" {word}" for word in words[first : first + count]]


def passkey_texts(settings: PasskeyConfig, prose: Sequence[str] = ()) -> Iterator[str]:
    """The texts of data.passkey; each draws how much filler it has, what it hides, and where.

    In half of the texts any place is as likely; in the other half the place's distance from the
    question is log-uniform, so that numbers close to the question are learned, too. Places are
    between any two words, so a number is anywhere in its segment.

    Args:
        prose: words of the text that filler `files` is cut from, at least one; see `cut_anywhere`.
    """
    random = Random(0)
    for _ in range(settings.documents):
        hidden = FORMS[settings.form](random)
        count = random.randint(0, settings.repetitions * len(WORDS))
        after = random.randint(0, count)
        if random.random() < 0.5:
            after = int((count + 1) ** random.random()) - 1
        words = cut_anywhere(settings.filler, count, random, prose)
        most = count - after if hidden.is_last else count
        placed = [(random.randint(0, most), other) for other in hidden.others]
        placed.append((count - after, hidden.statement))
        placed.sort(key=lambda each: each[0])
        for place, statement in reversed(placed):
            words.insert(place, statement)
        yield f"{hidden.head}{''.join(words)}{hidden.question} {hidden.answer}."


@dataclass(frozen=True)
class MadeTexts(TextInput):
    """The generated texts of a section.

    Attributes:
        filler: files with the text around what is hidden.
        held_out_share: share of the files' documents that are no filler, the ones that are held out
            where these files are text themselves.
    """

    made: PasskeyConfig = field(hash=False)
    filler: tuple[File, ...]
    held_out_share: float
    text_column: str
    key: str
    name: str = "passkey"

    def __str__(self) -> str:
        return self.name

    @property
    def place(self) -> str:
        return self.name

    def batches(self, span: Span | None = None) -> Iterator[Batch]:
        words = list[str]()
        for word in self._filler_words():
            if isinstance(word, Fault):
                yield [word]
            else:
                words.append(word)
        if self.made.filler == "files" and not words:
            raise Unreadable(
                "has no filler: the files contain no readable word that is not held out"
            )
        yield from in_batches(passkey_texts(self.made, words))

    def without_validation_files(self, validation: Sequence[TextInput]) -> "MadeTexts":
        return replace(self, filler=without_files(self.filler, validation))

    def _filler_words(self) -> TextRecords:
        """Words of the filler files as they are written, see `cut_anywhere`.

        Each file gives as much, from its beginning on, or all it has. A damaged file gives none.

        Yields:
            each word; a Fault for each bad record and each damaged file.
        """
        sizes = [file.size() or FILLER_CHARACTERS for file in self.filler]
        most = max(LEAST_OF_FILE, equal_limit(sizes, FILLER_CHARACTERS))
        left = FILLER_CHARACTERS
        for file in Random(0).sample(self.filler, len(self.filler)):
            words = list[str]()
            left_of_file = most
            try:
                for record in file.records():
                    if isinstance(record, Fault):
                        yield filler_fault(file, record.reason)
                        continue
                    if self._is_held_out(record):
                        continue
                    cut = record[:left_of_file]
                    in_cut = re.findall(r"\s*\S+", cut)
                    if in_cut and not in_cut[0][0].isspace():
                        in_cut[0] = f" {in_cut[0]}"
                    words += in_cut
                    left_of_file -= len(cut)
                    if left_of_file <= 0:
                        break
            except Unreadable as error:
                yield filler_fault(file, str(error))
                continue
            except OSError as error:
                if no_space(error):
                    raise
                reason = f"cannot be read ({error.strerror})"
                yield filler_fault(file, reason, is_unreachable=True)
                continue
            yield from words
            left -= most - left_of_file
            if left <= 0:
                break

    def _is_held_out(self, text: str) -> bool:
        digest = np.frombuffer(xxh3_128_digest(text.encode()), np.uint8)
        return bool(is_held_out(digest[None], self.held_out_share)[0])

    def stamp(self) -> Stamp | None:
        settings = self.made.model_dump().values()
        if self.made.filler != "files":
            return (MADE_VERSION, *settings)
        stamps = [(file.name, file.reader_key(), file.stamp()) for file in self.filler]
        if any(stamp is None for *_, stamp in stamps):
            return None
        return (MADE_FROM_FILES_VERSION, self.held_out_share, *settings, *stamps)

    def has_changed(self, stamp: Stamp) -> bool:
        return self.stamp() != stamp

    def last_change(self, stamp: Stamp | None) -> int:
        return max((file.last_change(file.stamp()) for file in self.filler), default=0)


def filler_fault(file: File, reason: str, is_unreachable: bool = False) -> Fault:
    """A Fault of the texts whose filler is from this file.

    Args:
        reason: completes '<file> …'.
    """
    return Fault(f"takes its filler from {file}, which {reason}", is_unreachable)


def equal_limit(sizes: Sequence[int], total: int) -> int:
    """The limit at which these sizes, each cut to it, have this total.

    It is the total itself where they have less.
    """
    left = total
    for number, size in enumerate(sorted(sizes)):
        limit = left // (len(sizes) - number)
        if size > limit:
            return limit
        left -= size
    return total


class Passkey(Source):
    """The texts that data.passkey describes."""

    license = "none: made by this program"

    def inputs(self, not_text: NotText) -> Inputs:
        made = self.section.passkey
        filler = list[File]()
        if made.filler == "files":
            filler = matching(self, self.section.files, "files", not_text)
        filler.sort(key=lambda file: file.name)
        texts = MadeTexts(
            made=made,
            filler=tuple(filler),
            held_out_share=self.validation_fraction,
            text_column=self.section.text_column,
            key=f"{self.place}.passkey",
        )
        return Inputs(training=[texts], validation=[])


SOURCE = Passkey
