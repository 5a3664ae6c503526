"""Recognition of a file by its first bytes, for `data.format: auto` and a name that misleads."""

import json
import re

from infini_llama.configs.text_formats import (
    BY_ENDING,
    DOCUMENT_ENDINGS,
    RECORD_ENDINGS,
    TEXT_FORMATS,
)
from infini_llama.tasks.preprocess.sources.texts import Refused, Unreadable

WINDOW = 2**16  # bytes that are looked at
# Endings of files that are markup, whose pages are their text.
MARKUP = ("html", "htm", "xhtml", "xml", "svg")
PROSE = ("txt", "md", "rst")
# Possessive: what was passed is not tried again, in other parts, where no tag follows.
BEFORE_MARKUP = rb"(?:\s|<\?xml[^>]*>|<!--.*?-->)*+"
PAGE = re.compile(
    BEFORE_MARKUP + rb"<(?:!doctype\s+html|html[\s>])", re.IGNORECASE | re.DOTALL
)
# Of S3, Azure and Google Cloud Storage.
ERROR_OF_STORAGE = re.compile(BEFORE_MARKUP + rb"<Error[^>]*>\s*<Code>", re.DOTALL)
JSON_OBJECT = re.compile(rb'\s*(\[\s*)?\{\s*"(?:[^"\\]|\\.)*+"\s*:')
# As in train.jsonl.1, table.csv.old and train.parquet-00000-of-00001.
FORMAT_IN_NAME = re.compile(rf"\.({'|'.join(RECORD_ENDINGS)})(?![a-z0-9])")
# Of documents whose text other programs extract.
DOCUMENTS = {
    b"%PDF-": "a PDF",
    rb"{\rtf": "RTF",
    b"\xd0\xcf\x11\xe0": "a document of an old Office program",
}
WORDS = {"json": "JSON", "jsonl": "JSON lines", "csv": "CSV", "tsv": "TSV"}
DELIMITERS = {"csv": ",", "tsv": "\t"}


def refuse_page(first: bytes, ending: str, is_served_as_page: bool) -> None:
    """Refuse a web page, or an object store's error, that was saved in place of a text.

    Args:
        first: the first bytes of the content, after a byte order mark.
        ending: of the file's name, in lower case; "" if it has none.
        is_served_as_page: the server says text/html of the file.

    Raises:
        Unreadable: it is one, and its name does not say so.
    """
    if ending in MARKUP:
        return
    if ERROR_OF_STORAGE.match(first):
        raise Unreadable(
            "is an error of an object store as XML, not the text; download it again, with "
            "credentials if it needs them"
        )
    # Some servers say text/html of every file: a page also begins with a tag.
    if PAGE.match(first) or (is_served_as_page and first.lstrip().startswith(b"<")):
        raise Unreadable(
            "is a web page, perhaps one to sign in, not the text; download the file itself, or set "
            "data.format=txt to train on pages"
        )


def refuse_binary(first: bytes) -> None:
    """Refuse a table in a binary format, or a formatted document, under the name of a text.

    Raises:
        Refused: it is a table.
        Unreadable: it is a formatted document.
    """
    for form in TEXT_FORMATS.values():
        if first.startswith(form.begins_with):
            raise _other_format(form.name)
    for begin, kind in DOCUMENTS.items():
        if first.startswith(begin):
            raise Unreadable(f"is {kind}, not text; extract its text into a file")


def refuse_records(
    first: bytes,
    name: str,
    ending: str,
    text_column: str,
) -> None:
    """Refuse records under a name for which the whole file would be one text.

    Args:
        first: the first bytes of the content, after a byte order mark.
        name: of the file, in lower case.
        ending: of the name; "" if it has none.

    Raises:
        Refused: they are JSON, or have a header with the column of the text, or the name has the
            ending of a format within it.
    """
    kind = _json_kind(first, ending, text_column) or _delimited_kind(first, text_column)
    if kind is None and ending not in (*DOCUMENT_ENDINGS, *MARKUP):
        in_name = FORMAT_IN_NAME.search(name)
        kind = BY_ENDING[in_name[1]].name if in_name else None
    if kind:
        raise _other_format(kind)


def _other_format(kind: str) -> Refused:
    as_text = (
        ""
        if TEXT_FORMATS[kind].is_binary
        else " (data.format=txt reads it as one text)"
    )
    return Refused(
        f"holds {WORDS.get(kind, kind)}, which the ending of its name does not say; "
        f"rename it to end with .{kind}, or set data.format={kind}{as_text}"
    )


def _json_kind(first: bytes, ending: str, text_column: str) -> str | None:
    """The format of content that begins with a JSON object; None: it does not.

    Files with endings of their own can be JSON by design, such as notebooks: they are records only
    if they are lines of objects, or have the field of the text.
    """
    begin = JSON_OBJECT.match(first)
    if begin is None:
        return None
    has_field = (
        json.dumps(text_column, ensure_ascii=False).encode(errors="replace") in first
    )
    is_array = begin[1] is not None
    lines = [] if is_array else first.lstrip().split(b"\n", 2)
    # No JSON value has "}", a line's end and "{" one after the other.
    are_lines = (
        len(lines) > 1
        and lines[0].rstrip().endswith(b"}")
        and lines[1].lstrip().startswith(b"{")
    )
    if are_lines or (len(first) == WINDOW and len(lines) == 1):
        return "jsonl"
    return "json" if has_field or ending in PROSE else None


def _delimited_kind(first: bytes, text_column: str) -> str | None:
    """The format whose header, with several columns, has that of the text; None: there is none.

    In a sentence, a space follows a comma.
    """
    header = first.splitlines()[0].decode(errors="replace") if first else ""
    for kind, delimiter in DELIMITERS.items():
        names = [name.strip('"') for name in header.split(delimiter)]
        has_spaces = any(name != name.strip() for name in names)
        if len(names) > 1 and text_column in names and not has_spaces:
            return kind
    return None
