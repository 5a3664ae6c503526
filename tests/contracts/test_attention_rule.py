"""The rule for attention on a CPU says what the stored measurement says."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from infini_llama.tasks.patch_environment.plan import BLOCKED_TOKENS

RESULTS = (
    Path(__file__).parents[2] / "benchmarks" / "results" / "attention-backends.json"
)


def faster_lengths() -> dict[tuple[str, int, bool, bool], dict[int, bool]]:
    """By precision, threads, whether weights are kept and whether rows have documents: of each length, whether no round has sdpa ahead.

    A row with documents may also be one document.
    """
    found = defaultdict[tuple[str, int, bool, bool], dict[int, bool]](dict)
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        for form, keeps in (("blocked", True), ("recomputed", False)):
            seconds = zip(row["seconds"]["sdpa"], row["seconds"][form], strict=True)
            faster = all(sdpa > blocked for sdpa, blocked in seconds)
            for documents in {bool(row["document"]), True}:
                lengths = found[row["precision"], row["threads"], keeps, documents]
                lengths[row["length"]] = lengths.get(row["length"], True) and faster
    with_documents = {
        (row["precision"], row["threads"], row["length"])
        for row in rows
        if row["document"]
    }
    return {
        (precision, threads, keeps, documents): {
            length: faster
            for length, faster in lengths.items()
            if not documents or (precision, threads, length) in with_documents
        }
        for (precision, threads, keeps, documents), lengths in found.items()
    }


def test_blocked_attention_is_used_exactly_where_all_stored_rounds_agree():
    """From the shortest such length to the last one before a length at which they do not."""
    stored = faster_lengths()
    assert {length for lengths in stored.values() for length in lengths} >= {
        128,
        256,
        512,
        1024,
        2048,
    }
    for key in stored.keys() | BLOCKED_TOKENS.keys():
        lengths = sorted(stored[key])
        expected = list[int]()
        for length in lengths:
            if stored[key][length]:
                expected.append(length)
            elif expected:
                break
        used = BLOCKED_TOKENS.get(key)
        assert used == ((expected[0], expected[-1]) if expected else None), (
            f"{key}: {stored[key]}"
        )
