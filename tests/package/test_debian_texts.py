"""scripts/debian_texts.py: what of a package is text, and how it is cut into files."""

import gzip
import math

import pytest

from support.scripts import script

PAGE = """<html><head><title>No text</title><style>p {}</style></head><body><nav>Menu</nav>
<p>One &amp; the
same.</p><script>no()</script><ul><li>First</li><li>Second</li></ul></body></html>"""


@pytest.fixture(name="script")
def loaded():
    return script("debian_texts")


def test_a_page_is_its_text_in_paragraphs(script, tmp_path):
    (tmp_path / "page.html").write_text(PAGE)
    paragraphs = script.text_of(tmp_path / "page.html").split("\n\n")
    assert [text.strip() for text in paragraphs if text.strip()] == [
        "One & the\nsame.",
        "First",
        "Second",
    ]


def test_a_package_is_cut_between_paragraphs_and_has_a_limit(script, tmp_path):
    text = "\n\n".join(f"{number:04} " + "word " * 200 for number in range(2000))
    (tmp_path / "a.dict.dz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.dict.dz").write_bytes(gzip.compress(b"short"))
    cut = list(script.parts(tmp_path, "*.dict.dz", script.MOST))
    assert 29 <= len(cut) <= 31 and all(part[:4].isdigit() for part in cut)
    assert all(script.PART <= len(part) < script.PART + 1100 for part in cut)
    assert text.startswith("".join(cut).rstrip("\n"))
    whole = "".join(script.parts(tmp_path, "a*", math.inf))
    assert whole.rstrip("\n") == text
    assert list(script.parts(tmp_path, "b*", math.inf)) == ["short\n\n"]
