"""The rule for attention on a CPU says what the stored measurement says."""

import json
from collections import defaultdict
from pathlib import Path

from infini_llama.tasks.patch_environment.plan import BLOCKED_TOKENS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "attention-cpu.json"


def faster_lengths() -> dict[tuple[str, int, bool], dict[int, bool]]:
    """By precision, threads and whether weights are kept: of each length, whether no round of any shape has sdpa ahead."""
    found = defaultdict[tuple[str, int, bool], dict[int, bool]](dict)
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["backends"]:
        for form, keeps in (("blocked", True), ("recomputed", False)):
            if not row["document"]:
                seconds = zip(row["seconds"]["sdpa"], row["seconds"][form], strict=True)
                lengths = found[row["precision"], row["threads"], keeps]
                faster = all(sdpa > blocked for sdpa, blocked in seconds)
                lengths[row["length"]] = lengths.get(row["length"], True) and faster
    return found


def test_blocked_attention_is_used_exactly_where_all_stored_rounds_agree():
    stored = faster_lengths()
    assert {length for lengths in stored.values() for length in lengths} >= {128, 256, 512, 1024, 2048}
    for key in stored.keys() | BLOCKED_TOKENS.keys():
        first, last = BLOCKED_TOKENS.get(key, (1, 0))
        expected = {length: first <= length <= last for length in stored[key]}
        assert stored[key] == expected, f"{key}: {stored[key]}"
        assert key not in BLOCKED_TOKENS or {first, last} <= stored[key].keys()


def test_sdpa_is_ahead_in_a_round_of_short_documents_with_either_number_of_threads():
    """So that rows with documents stay with sdpa, whatever their length."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["backends"]
    short = [row for row in rows if row["document"] == 100]
    for threads in (1, 2):
        rounds = [
            sdpa < own
            for row in short
            if row["threads"] == threads
            for sdpa, own in zip(row["seconds"]["sdpa"], row["seconds"]["blocked"], strict=True)
        ]
        assert any(rounds), threads
