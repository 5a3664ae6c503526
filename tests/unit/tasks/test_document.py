"""Pieces of documents: nothing breaks out of its place, and what Prefect and a terminal are not shown."""

import pytest

from infini_llama.flows.cli.tables import terminal
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.document import (
    Chart,
    Curve,
    Detail,
    Document,
    cell,
    code,
    facts,
    markdown,
    section,
    table,
    text_block,
)
from infini_llama.tasks.report.artifact_keys import ArtifactKeys
from infini_llama.tasks.report.page import page


def test_a_failing_artifact_card_is_logged_and_does_not_stop_the_work(caplog):
    with best_effort("the dataset's card"):
        raise OSError("gone")
    assert "the dataset's card" in caplog.text and "gone" in caplog.text
    with pytest.raises(KeyboardInterrupt), best_effort("the dataset's card"):
        raise KeyboardInterrupt


HOSTILE = (
    "a|b",
    "**x**",
    "![i](http://h/i.png)",
    "[a](http://h)",
    "<script>x</script>",
    "&lt;",
    "`t`",
    "_e_",
    "a\\|b",
    "~~s~~",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_shows_its_text_as_it_is_everywhere(text, read_page):
    document = Document(
        "t", (facts({"name": text}), table([{"name": text, "n": 1}]), cell(text))
    )
    shown = read_page(page(document))
    assert shown.text.count(text) == 3 and not {
        "img",
        "script",
        "em",
        "strong",
        "code",
        "a",
    } & set(shown.elements)
    assert shown.elements.count("td") == 4
    assert terminal(markdown(document)).count(text) == 3


def test_numbers_are_right_aligned_and_lines_are_joined():
    assert table([{"a": 1, "b": "x\ny"}]) == "| a | b |\n| ---: | --- |\n| 1 | x y |"


def test_a_text_cannot_close_its_fence(read_page):
    text = "``` and ````\n#### no heading\n| no | table |"
    document = Document("t", (text_block(text),))
    assert text_block(text).startswith("`````text\n")
    assert read_page(page(document)).elements.count("pre") == 1 and text in page(
        document
    )
    assert text in terminal(markdown(document))
    assert "x" * 10 + " …" in text_block("x" * 50, 10)
    assert code("a `` b") == "```a `` b```"


def test_details_and_charts_are_on_the_page_only(read_page):
    chart = Chart("Loss", [Curve("", [1, 2], [3.0, 2.0])])
    empty = Chart("Nothing", [Curve("", [1], [float("nan")])])
    parts = (
        *section("Curves", chart, empty, Detail("All", "folded")),
        *section("Gone", "", empty),
        *section("Kept", "x"),
    )
    document = Document("t", parts)
    assert markdown(document) == "# t\n\n## Kept\n\nx\n"
    assert (
        markdown(document, "![p](data:)")
        == "# t\n\n## Curves\n\n![p](data:)\n\n## Kept\n\nx\n"
    )
    shown = read_page(page(document))
    assert (
        shown.elements.count("svg") == shown.elements.count("details") == 1
        and "Gone" not in shown.text
    )


def test_a_key_has_small_letters_digits_and_dashes_only():
    assert (
        ArtifactKeys("a run", "My_run.v2-{x}").key("training") == "training-my-run-v2-x"
    )
