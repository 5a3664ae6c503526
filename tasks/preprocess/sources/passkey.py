"""Texts with a number hidden among words that repeat (Mohtashami and Jaggi 2023, arXiv 2305.16300, section 4.2).

They are made, not read: the same settings give the same texts, for training (data.source: passkey) and for `infini-llama passkey`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

HEAD = "There is an important number hidden in a lot of other text. Find it and remember it."
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HIDDEN = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
DIGITS = 5


def new_key(random: Random) -> str:
    return str(random.randrange(10 ** (DIGITS - 1), 10**DIGITS))


@dataclass(frozen=True)
class PasskeyTexts:
    """`documents` texts; each draws its key, its length of 1 to `repetitions` repetitions, and the key's place in them."""

    documents: int
    repetitions: int
    seed: int

    def __iter__(self) -> Iterator[str]:
        random = Random(self.seed)
        for _ in range(self.documents):
            count, key = random.randint(1, self.repetitions), new_key(random)
            before = random.randint(0, count)
            hidden = HIDDEN.format(key=key)
            yield f"{HEAD}{FILLER * before}{hidden}{FILLER * (count - before)}{QUESTION} {key}."
