"""Programs whose results differ are not compared: a benchmark ends with an error then, before it stores anything."""

from collections.abc import Mapping, Sequence

TOLERANCE = 1e-3  # relative, of a loss: more than rounding explains for the first steps of a training


def require_equal(what: str, results: Mapping[str, object]) -> None:
    """`what` (token ids, rows, bytes) has to be the same for every program.

    Raises:
        SystemExit: with a sentence that names two programs whose results differ.
    """
    (first, expected), *others = results.items()
    for name, found in others:
        if found != expected:
            raise SystemExit(
                f"nothing is stored: {what} of {name} ({found}) differ from those of {first} ({expected}), "
                "so their times cannot be compared."
            )


def require_close(
    what: str, results: Mapping[str, Sequence[float]], tolerance: float = TOLERANCE
) -> float:
    """Numbers of every program have to agree; returns the largest relative difference from the first program's.

    Raises:
        SystemExit: a difference above `tolerance`, a number that is not finite, or another count of numbers.
    """
    (first, expected), *others = results.items()
    largest = 0.0
    for name, found in [(first, expected), *others]:
        apart = [abs(a - b) / abs(a) for a, b in zip(expected, found, strict=False)]
        if len(found) != len(expected) or not all(
            one <= tolerance for one in apart
        ):  # NaN compares as false
            raise SystemExit(
                f"nothing is stored: {what} of {name} ({_numbers(found)}) differ from those of {first} ({_numbers(expected)}) "
                f"by more than {tolerance:g}, so their times cannot be compared."
            )
        largest = max(largest, *apart, 0.0)
    return largest


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.5g}" for value in values[:6]) + (
        " …" if len(values) > 6 else ""
    )
