"""Datasets of made-up texts have the names and digests that they had when this file was written.

A change of the stored values means that every existing dataset is prepared again. It needs a reason, and a new version of the
dataset format or of the readers. `python tests/unit/tasks/preprocess/test_golden_digests.py` prints the values of today.
"""

import csv
import gzip
import io
import json
import random
import sys
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess

STORED = Path(__file__).with_name("golden_digests.json")
WORDS = (
    "river",
    "Ärger",
    "42",
    "don't",
    "naïve",
    "中文",
    "def f(x):",
    "\t",
    "  ",
    "\n",
    "end.",
)


def made_up_texts(count: int = 60) -> list[str]:
    """Texts of 1 to 80 words, some of them twice; the same ones in each call."""
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 80))) for _ in range(count)]
    return [*texts, *texts[:5]]


def write_lines(texts: list[str]) -> bytes:
    return "".join(
        json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)
    ).encode()


def write_csv(texts: list[str]) -> bytes:
    stream = io.StringIO(newline="")
    rows = csv.writer(stream)
    rows.writerow(["id", "text"])
    rows.writerows(enumerate(texts))
    return stream.getvalue().encode()


def write_tsv(texts: list[str]) -> bytes:
    rows = [f"{n}\t{' '.join(text.split())}" for n, text in enumerate(texts)]
    return "\n".join(["id\ttext", *rows, ""]).encode()


def write_parquet(texts: list[str]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), stream, row_group_size=20)
    return stream.getvalue()


def write_arrow(texts: list[str]) -> bytes:
    table = pa.table({"text": texts})
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return stream.getvalue()


FILES_OF_RECORDS = {
    "texts.jsonl": write_lines,
    "texts.ndjson": write_lines,
    "texts.json": lambda texts: json.dumps([{"text": text} for text in texts]).encode(),
    "texts.csv": write_csv,
    "texts.tsv": write_tsv,
    "texts.parquet": write_parquet,
    "texts.arrow": write_arrow,
    "texts.jsonl.gz": lambda texts: gzip.compress(write_lines(texts)),
}
PLAIN_ENDINGS = ("txt", "md", "rst", "py")
SETTINGS = {
    "chunked": {},
    "deduplicated": {"deduplicate": True},
    "windows": {"packing": "window", "stride": 16},
    "best fit": {"packing": "best_fit"},
    "padded": {"packing": "padded"},
    "answers": {"loss_on": "answer", "answer_after": " river", "min_length": 0},
}


def write_folder(folder: Path) -> None:
    """The texts in each format; those of plain formats are a file per document, in a folder per ending."""
    texts = made_up_texts()
    for name, write in FILES_OF_RECORDS.items():
        (folder / name).write_bytes(write(texts))
    for ending in PLAIN_ENDINGS:
        (folder / ending).mkdir()
        for number, text in enumerate(texts):
            (folder / ending / f"{number:03d}.{ending}").write_text(
                text, encoding="utf-8", newline=""
            )
    with_answers = [f"{text} river {number}" for number, text in enumerate(texts)]
    (folder / "answers.jsonl").write_bytes(write_lines(with_answers))


def digests_of(given: dict[str, object], home: Path) -> list[str]:
    """Name and digest of the dataset, and the digest of its row table."""
    tokenizer = {"vocab_size": 300}
    fixed = {"tokenizer": tokenizer, "sequence_length": 32, "validation_fraction": 0.2}
    reference = preprocess(DataConfig.model_validate(fixed | given), home)
    return [reference.name, reference.digest, reference.row_table_digest]


def cases(folder: Path) -> dict[str, dict[str, object]]:
    found = {name: {"files": [str(folder / name)]} for name in FILES_OF_RECORDS}
    found |= {ending: {"files": [str(folder / ending)]} for ending in PLAIN_ENDINGS}
    found["python-stdlib"] = {"source": "python-stdlib"}
    for name, settings in SETTINGS.items():
        file = "answers.jsonl" if name == "answers" else "texts.jsonl"
        found[name] = {"files": [str(folder / file)], **settings}
    found["held out"] = {
        "files": [str(folder / "texts.jsonl")],
        "validation_files": [str(folder / "txt" / "00*.txt")],
    }
    found["two sources"] = {
        "sources": [
            {"name": "a", "files": [str(folder / "texts.csv")], "weight": 2},
            {"name": "b", "files": [str(folder / "answers.jsonl")], "weight": 1},
        ]
    }
    return found


NAMES = sorted(cases(Path()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("texts")
    write_folder(made)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_datasets_have_the_stored_names_and_digests(
    name, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder / "py")})
    assert (
        digests_of(cases(folder)[name], tmp_path)
        == json.loads(STORED.read_text())[name]
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "texts"
        folder.mkdir()
        write_folder(folder)
        # As the test replaces it.
        sysconfig.get_paths = lambda: {"stdlib": str(folder / "py")}
        found = {
            name: digests_of(given, Path(place) / f"home-{number}")
            for number, (name, given) in enumerate(sorted(cases(folder).items()))
        }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
