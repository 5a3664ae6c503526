"""English of nine kinds from Debian's packages, in files that a configuration reads as texts/**/*.txt.

    python scripts/debian_texts.py texts
    python scripts/debian_texts.py books --held-out

The second writes other books, whole, to measure on: nothing of them is in the first. It needs apt-get and dpkg-deb (Debian, Ubuntu), and installs nothing.
"""

import argparse
import gzip
import math
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

# By package: where its text is.
TEXTS = {
    "anarchism": "usr/share/doc/anarchism/html/*.html",
    "dict-devil": "usr/share/dictd/*.dict.dz",
    "dict-foldoc": "usr/share/dictd/*.dict.dz",
    "exim4-doc-html": "usr/share/doc/exim4-doc-html/**/*.html",
    "git-doc": "usr/share/doc/git/html/**/*.html",
    "jargon-text": "usr/share/doc/jargon-text/*.gz",
    "perl-doc": "usr/share/perl/*/pod/*.pod",
    "rust-doc": "usr/share/doc/rust-doc/html/book/*.html",
    "sqlite3-doc": "usr/share/doc/sqlite3/**/*.html",
}
# To measure on, in the order in which they are read.
HELD_OUT = {
    "debian-handbook": "usr/share/doc/debian-handbook/html/en-US/*.html",
    "developers-reference": "usr/share/developers-reference/*.html",
    "postgresql-doc-15": "usr/share/doc/postgresql-doc-15/html/*.html",
}
MOST = 900_000  # characters of a package
PART = 30_000  # characters of a file: some files are held out, and then of all kinds
BLOCKS = {"p", "div", "li", "dt", "dd", "td", "h1", "h2", "h3", "h4", "pre", "br", "tr"}
NO_TEXT = {"head", "script", "style", "nav"}


class Prose(HTMLParser):
    """The text of a page, with an empty line before each block."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.inside = 0  # of elements that have no text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside += tag in NO_TEXT
        if tag in BLOCKS:
            self.text = f"{self.text.rstrip()}\n\n"

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag in NO_TEXT

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.text += data


def text_of(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix in (".gz", ".dz"):
        content = gzip.decompress(content)
    text = content.decode(errors="replace")
    if file.suffix != ".html":
        return text
    page = Prose()
    page.feed(text)
    return page.text


def parts(folder: Path, pattern: str, most: float) -> Iterator[str]:
    """Parts of at most `most` characters of the text of a package, each of whole paragraphs."""
    part = ""
    left = most
    for file in sorted(folder.glob(pattern)):
        for paragraph in text_of(file).split("\n\n"):
            part += paragraph + "\n\n"
            if len(part) < PART:
                continue
            yield part
            left -= len(part)
            part = ""
            if left <= 0:
                return
    if part.strip():
        yield part


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="FOLDER")
    parser.add_argument("--held-out", action="store_true", help="other books, whole")
    given = parser.parse_args()
    chosen = HELD_OUT if given.held_out else TEXTS
    most = math.inf if given.held_out else MOST
    output = given.output
    with TemporaryDirectory() as temporary:
        subprocess.run(
            ["apt-get", "download", "--quiet", *chosen], cwd=temporary, check=True
        )
        for package, pattern in chosen.items():
            (archive,) = Path(temporary).glob(f"{package}_*.deb")
            unpacked = Path(temporary) / package
            subprocess.run(["dpkg-deb", "--extract", archive, unpacked], check=True)
            texts = list(parts(unpacked, pattern, most))
            if not texts:
                raise SystemExit(f"{archive.name} has no file {pattern}.")
            (output / package).mkdir(parents=True, exist_ok=True)
            for number, text in enumerate(texts):
                (output / package / f"{number:03}.txt").write_text(
                    text, encoding="utf-8"
                )
            print(f"{package}: {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
