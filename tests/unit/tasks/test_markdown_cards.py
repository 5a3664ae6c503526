"""Pieces of the cards: they cannot break out of their place, and they never stop the work."""

import pytest

from infini_llama.tasks.formatting import RunPage, best_effort, cell, table, text_block


def test_a_failing_artifact_card_is_logged_and_does_not_stop_the_work(caplog):
    with best_effort("the dataset's card"):
        raise OSError("gone")
    assert "the dataset's card" in caplog.text and "gone" in caplog.text
    with pytest.raises(KeyboardInterrupt), best_effort("the dataset's card"):
        raise KeyboardInterrupt


def test_cells_and_fences_are_escaped():
    assert cell("a|b\nc") == "a\\|b c"
    assert table(("a", "b"), [(1, "x|y")]) == ["| a | b |", "| --- | --- |", "| 1 | x\\|y |", ""]
    fenced = text_block("``` and ````")
    assert fenced[0] == "`````text" and fenced[2] == "`````"
    assert text_block("x" * 50, 10)[1] == "x" * 10 + " …"


def test_a_key_has_small_letters_digits_and_dashes_only():
    assert RunPage("a run", "My_run.v2-{x}").key("training") == "training-my-run-v2-x"
