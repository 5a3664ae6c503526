"""Rows of the memory's tasks: facts in earlier segments, questions in the last one, and filler that is drawn at random."""

import torch

from infini_llama.model.loss import IGNORE_INDEX

SEGMENT, FILLERS, DIGITS, LETTERS, KEYS, VALUES = 16, 20, 10, 8, 16, 16
Rows = tuple[torch.Tensor, torch.Tensor]


def draw(generator: torch.Generator, count: int, of: int, taken: int) -> torch.Tensor:
    """Different numbers below `of`, [count, taken], in random order."""
    return torch.rand(count, of, generator=generator).argsort(dim=1)[:, :taken]


def passkey_rows(
    count: int, segments: int, generator: torch.Generator, far: bool
) -> Rows:
    """Inputs and labels [count, segments * SEGMENT]; with `far` the number is in the first segment, else in any but the last."""
    key, question, size = FILLERS + DIGITS, FILLERS + DIGITS + 1, 5
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    digits = FILLERS + torch.randint(DIGITS, (count, size), generator=generator)
    segment = torch.randint(1 if far else segments - 1, (count, 1), generator=generator)
    places, each = (
        torch.randint(SEGMENT - size, (2, count, 1), generator=generator),
        torch.arange(size),
    )
    hidden, asked = segment * SEGMENT + places[0], (segments - 1) * SEGMENT + places[1]
    for mark, start in ((key, hidden), (question, asked)):
        inputs.scatter_(1, start, mark)
        inputs.scatter_(1, start + 1 + each, digits)
    labels.scatter_(1, asked + each, digits)
    return inputs, labels


def recall_rows(
    count: int,
    segments: int,
    generator: torch.Generator,
    far: bool,
    keys: int = KEYS,
    facts: int = 6,
    values: int = VALUES,
) -> Rows:
    """As `passkey_rows`, of facts (key, value) as one token each; with `far` they are in the first segment, else in all but the last.

    At most a segment of them is asked for.
    """
    first_fact = FILLERS
    first_query = first_fact + keys * values
    first_answer = first_query + keys
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    key, value = (
        draw(generator, count, keys, facts),
        torch.randint(values, (count, facts), generator=generator),
    )
    where = draw(generator, count, SEGMENT if far else (segments - 1) * SEGMENT, facts)
    inputs.scatter_(1, where, first_fact + key * values + value)
    asks = min(facts, SEGMENT)
    asked = (segments - 1) * SEGMENT + draw(generator, count, SEGMENT, asks)
    inputs.scatter_(1, asked, first_query + key[:, :asks])
    labels.scatter_(1, asked, first_answer + value[:, :asks])
    return inputs, labels


def overwritten_rows(
    count: int, segments: int, generator: torch.Generator, far: bool
) -> Rows:
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
            1,
            segment * SEGMENT + draw(generator, count, SEGMENT, facts),
            first_fact + key * VALUES + value,
        )
    asked = (segments - 1) * SEGMENT + draw(generator, count, SEGMENT, facts)
    inputs.scatter_(1, asked, first_query + key)
    labels.scatter_(1, asked, first_answer + new)
    return inputs, labels


def pairs_rows(
    count: int,
    segments: int,
    generator: torch.Generator,
    far: bool,
    letters: int = 0,
    shared: bool = False,
    ambiguous: float = 0.0,
) -> Rows:
    """As `passkey_rows`, of three facts: a mark, a first and a second letter, and two digits, the first of which no two facts share.

    A fact has one of three places in its segment, so that two facts of one segment do not overlap, and so has a question. All facts
    are asked for, in another order, and training scores all of a question that can be known: the second letter and the digits.
    With `far`, only the digits of the first question are, as a later one can be answered by what is left.

    Args:
        letters: first letters that occur, and second ones; 0: 2 to 8, drawn per batch, and 4 with `far`. Of few, facts share more.
        shared: the second letters are the same tokens as the first ones.
        ambiguous: share of the rows of a training in which one fact shares its first letter with the second fact and its second
            letter with the third, so that neither letter tells it apart.
    """
    facts, size, first_letter, key = (
        3,
        5,
        FILLERS + DIGITS,
        FILLERS + DIGITS + 2 * LETTERS,
    )
    letters = letters or (
        4 if far else int(torch.randint(2, LETTERS + 1, (), generator=generator))
    )
    inputs = torch.randint(FILLERS, (count, segments * SEGMENT), generator=generator)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    names = draw(generator, count, letters * letters, facts)
    if ambiguous and not far:
        (a, other_a), (b, other_b) = (
            draw(generator, count, letters, 2).T for _ in range(2)
        )
        alike = torch.stack(
            (a * letters + b, a * letters + other_b, other_a * letters + b), dim=1
        )
        names = torch.where(
            torch.rand(count, 1, generator=generator) < ambiguous, alike, names
        )
    names = first_letter + torch.stack(
        (names // letters, names % letters + (0 if shared else LETTERS)), dim=2
    )
    digits = FILLERS + torch.stack(
        (
            draw(generator, count, DIGITS, facts),
            torch.randint(DIGITS, (count, facts), generator=generator),
        ),
        dim=2,
    )
    # [count, facts, size].
    content = torch.cat((torch.full((count, facts, 1), key), names, digits), dim=2)
    last, asked = 3 * (segments - 1), content.clone()
    asked[..., 0] = key + 1
    where = []
    for slots, tokens in (
        (draw(generator, count, 3 if far else last, facts), content),
        (last + draw(generator, count, 3, 3), asked),
    ):
        starts = (
            slots // 3 * SEGMENT
            + slots % 3 * size
            + torch.randint(2, (count, 1), generator=generator)
        )
        where = starts[..., None] + torch.arange(size)  # [count, facts, size]
        inputs.scatter_(1, where.flatten(1), tokens.flatten(1))
    if far:
        first = torch.arange(count), starts.argmin(dim=1)
        labels.scatter_(1, where[first][:, 2:4], asked[first][:, 3:])
    else:
        labels.scatter_(1, where[..., 1:4].flatten(1), asked[..., 2:].flatten(1))
    return inputs, labels
