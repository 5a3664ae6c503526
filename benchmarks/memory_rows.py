"""Rows of the memory's tasks: facts in earlier segments, questions in the last one, and filler that is drawn at random."""

import torch

from infini_llama.model.loss import IGNORE_INDEX

SEGMENT, FILLERS, DIGITS, KEYS, VALUES = 16, 20, 10, 16, 16
Rows = tuple[torch.Tensor, torch.Tensor]


def draw(generator: torch.Generator, count: int, of: int, taken: int) -> torch.Tensor:
    """Different numbers below `of`, [count, taken], in random order."""
    return torch.rand(count, of, generator=generator).argsort(dim=1)[:, :taken]


def passkey_rows(count: int, segments: int, generator: torch.Generator, far: bool) -> Rows:
    """Inputs and labels [count, segments * SEGMENT]; with `far` the number is in the first segment, else in any but the last."""
    key, question, size = FILLERS + DIGITS, FILLERS + DIGITS + 1, 5
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    digits = FILLERS + torch.randint(DIGITS, (count, size), generator=generator)
    segment = torch.randint(1 if far else segments - 1, (count, 1), generator=generator)
    places, each = torch.randint(SEGMENT - size, (2, count, 1), generator=generator), torch.arange(size)
    hidden, asked = segment * SEGMENT + places[0], (segments - 1) * SEGMENT + places[1]
    for mark, start in ((key, hidden), (question, asked)):
        inputs.scatter_(1, start, mark)
        inputs.scatter_(1, start + 1 + each, digits)
    labels.scatter_(1, asked + each, digits)
    return inputs, labels


def recall_rows(
    count: int, segments: int, generator: torch.Generator, far: bool, keys: int = KEYS, facts: int = 6
) -> Rows:
    """As `passkey_rows`, of facts (key, value) as one token each; with `far` they are in the first segment, else in all but the last.

    At most a segment of them is asked for.
    """
    values = VALUES
    first_fact = FILLERS
    first_query = first_fact + keys * values
    first_answer = first_query + keys
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    key, value = draw(generator, count, keys, facts), torch.randint(values, (count, facts), generator=generator)
    where = draw(generator, count, SEGMENT if far else (segments - 1) * SEGMENT, facts)
    inputs.scatter_(1, where, first_fact + key * values + value)
    asks = min(facts, SEGMENT)
    asked = (segments - 1) * SEGMENT + draw(generator, count, SEGMENT, asks)
    inputs.scatter_(1, asked, first_query + key[:, :asks])
    labels.scatter_(1, asked, first_answer + value[:, :asks])
    return inputs, labels


def overwritten_rows(count: int, segments: int, generator: torch.Generator, far: bool) -> Rows:
    """As `recall_rows`, of four facts that each get another value in a later segment; the later one is asked for.

    With `far` the values are in the first two segments. A memory that cannot tell earlier from later is right half of the time.
    """
    facts, first_fact = 4, FILLERS
    first_query = first_fact + KEYS * VALUES
    first_answer = first_query + KEYS
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    key = draw(generator, count, KEYS, facts)
    old = torch.randint(VALUES, (count, facts), generator=generator)
    new = (old + torch.randint(1, VALUES, (count, facts), generator=generator)) % VALUES
    change = torch.ones(count, 1, dtype=torch.int64)  # the segment of the new values
    if not far:
        change = torch.randint(1, segments - 1, (count, 1), generator=generator)
    earlier = (torch.rand(count, 1, generator=generator) * change).long()
    for segment, value in ((earlier, old), (change, new)):
        inputs.scatter_(
            1, segment * SEGMENT + draw(generator, count, SEGMENT, facts), first_fact + key * VALUES + value
        )
    asked = (segments - 1) * SEGMENT + draw(generator, count, SEGMENT, facts)
    inputs.scatter_(1, asked, first_query + key)
    labels.scatter_(1, asked, first_answer + new)
    return inputs, labels


def pairs_rows(count: int, segments: int, generator: torch.Generator, far: bool) -> Rows:
    """As `passkey_rows`, of three facts (mark, two of four letters, two digits), of which one is asked for.

    A fact has one of three places in its segment, so that two facts of one segment do not overlap.
    """
    letters, facts, size = 4, 3, 5
    first_letter = FILLERS + DIGITS
    key, question = first_letter + letters, first_letter + letters + 1
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    names = draw(generator, count, letters * letters, facts)
    digits = FILLERS + torch.randint(DIGITS, (count, facts, 2), generator=generator)
    names = first_letter + torch.stack((names // letters, names % letters), dim=2)
    content = torch.cat((torch.full((count, facts, 1), key), names, digits), dim=2)  # [count, facts, size]
    places = draw(generator, count, 3 if far else 3 * (segments - 1), facts)
    starts = (places // 3 * SEGMENT + places % 3 * size + torch.randint(2, (count, 1), generator=generator))[..., None]
    inputs.scatter_(1, (starts + torch.arange(size)).flatten(1), content.flatten(1))
    asked = (segments - 1) * SEGMENT + torch.randint(SEGMENT - size + 1, (count, 1), generator=generator)
    query = content[:, 0].clone()  # which of the facts is first is random
    query[:, 0] = question
    inputs.scatter_(1, asked + torch.arange(size), query)
    labels.scatter_(1, asked + 2 + torch.arange(2), digits[:, 0])
    return inputs, labels
