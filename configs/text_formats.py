"""Facts of each text format, without what reads it.

The object of its name in `FORMATS` of its module in tasks/preprocess/sources reads it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextFormat:
    """The facts of one format.

    Attributes:
        name: value of data.format.
        endings: of its files' names, in lower case.
        module: of tasks/preprocess/sources.
        is_document: a file is one document; else each record of it is one.
        is_binary: a file is not text in UTF-8.
        begins_with: first bytes of a binary file; () if they do not show the format.
        holds_lock: most of its reading holds Python's lock, so that threads do not speed it up.
    """

    name: str
    endings: tuple[str, ...]
    module: str
    is_document: bool = False
    is_binary: bool = False
    begins_with: tuple[bytes, ...] = ()
    holds_lock: bool = False


TEXT_FORMATS: dict[str, TextFormat] = {
    form.name: form
    for form in (
        TextFormat("txt", ("txt", "md", "rst", "py"), "plain", is_document=True),
        TextFormat("json", ("json",), "json_texts", holds_lock=True),
        TextFormat("jsonl", ("jsonl", "ndjson"), "json_texts"),
        TextFormat("csv", ("csv",), "delimited", holds_lock=True),
        TextFormat("tsv", ("tsv",), "delimited", holds_lock=True),
        TextFormat(
            "parquet", ("parquet",), "columnar", is_binary=True, begins_with=(b"PAR1",)
        ),
        TextFormat(
            name="arrow",
            endings=("arrow",),
            module="columnar",
            is_binary=True,
            # A file, and a stream.
            begins_with=(b"ARROW1", b"\xff\xff\xff\xff"),
        ),
    )
}
BY_ENDING = {ending: form for form in TEXT_FORMATS.values() for ending in form.endings}
DOCUMENT_ENDINGS = [ending for ending, form in BY_ENDING.items() if form.is_document]
RECORD_ENDINGS = [ending for ending, form in BY_ENDING.items() if not form.is_document]
OTHER_ENDINGS = [ending for ending in BY_ENDING if ending not in TEXT_FORMATS]


def listed(words: list[str], last: str) -> str:
    """The words as in "a, b and c"; `last` is the word before the last one."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
