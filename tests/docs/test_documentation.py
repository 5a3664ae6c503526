"""What the pages name is there: tests, files, headings, commands and their options, keys, papers."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infini_llama.configs.keys import all_keys
from infini_llama.flows.cli.commands import COMMANDS, EVERY_COMMAND

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import make_numbers  # noqa: E402
import memory_results  # noqa: E402

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests/seed_features.md",
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SECTIONS = [
    name for name, is_section in all_keys().items() if is_section and "." not in name
]
KEY = re.compile(rf"(?<![\w./])((?:{'|'.join(SECTIONS)})(?:\.[a-z_]\w*)+)(?![\w(])")
FILE_ENDINGS = (
    ".py",
    ".json",
    ".jsonl",
    ".md",
    ".yaml",
    ".safetensors",
    ".html",
    ".npy",
    ".sbatch",
)
PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mkdocs make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in headings
    }


@each_page
def test_links_resolve(page):
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links to {target}, which has no such heading"
        )


FOLDERS = (
    "benchmarks",
    "configs",
    "deploy",
    "docs",
    "flows",
    "model",
    "scripts",
    "tasks",
    "tests",
)
IN_FOLDER = re.compile(rf"(?<![\w./])(?:{'|'.join(FOLDERS)})/[\w./*-]*")
CODE = re.compile(r"`([^`\n]+)`")
DEFINED_IN = re.compile(r"`(\w+)` (?:in|of) `([\w/]+\.py)`")


@pytest.mark.parametrize(
    "page", [*PAGES[:-1], ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_paths_of_the_repository_exist(page):
    codes = CODE.findall(FENCE.sub("", read(page)))
    paths = {path.rstrip(".") for code in codes for path in IN_FOLDER.findall(code)}
    paths -= {"scripts/tok_train.py"}  # nanochat's
    assert not [
        path
        for path in sorted(paths)
        if not any((*ROOT.glob(path), *ROOT.glob(f"{path}.py")))
    ]


def test_files_and_names_of_the_architecture_exist():
    text = read(ROOT / "docs/architecture.md")
    files = {code for code in CODE.findall(text) if re.fullmatch(r"[\w/]+\.py", code)}
    places = {
        file: [
            place for folder in FOLDERS for place in ROOT.glob(f"{folder}/**/{file}")
        ]
        for file in files
    }
    places |= {file: [ROOT / file] for file in files if (ROOT / file).is_file()}
    assert len(files) > 30 and not [
        file for file, found in sorted(places.items()) if not found
    ]
    for name, file in DEFINED_IN.findall(text):
        assert any(
            re.search(rf"^ *(?:def |class )?{name}\b", read(place), re.MULTILINE)
            for place in places[file]
        ), f"{name} is not defined in {file}"


def subcommands() -> dict[str, set[str]]:
    """Each command and its options."""
    arguments = {
        name: [*command.arguments, *EVERY_COMMAND] for name, command in COMMANDS.items()
    }
    return {
        name: {word for words, _ in options for word in words}
        for name, options in arguments.items()
    }


def spoken(text: str) -> Iterator[tuple[str, str]]:
    """(command, the rest of its line) wherever `infini-llama command` stands in code."""
    pieces = [block for _, block in FENCE.findall(text)]
    text = FENCE.sub("", text)
    pieces += re.findall(r"^(?: {4}|\t)(.+)$", text, re.MULTILINE) + re.findall(
        r"`([^`\n]+)`", text
    )
    for line in "\n".join(pieces).splitlines():
        found = re.search(r"(?<![\w/.-])infini-llama ([a-z][\w-]*)([^#`]*)", line)
        if found:
            yield found[1], found[2]


@each_page
def test_commands_and_their_options_exist(page):
    known = subcommands()
    for command, rest in spoken(page.read_text(encoding="utf-8")):
        assert command in known, f"{page.name}: infini-llama {command}"
        values = re.compile("'[^']*'")  # may have options of another program
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", values.sub("", rest)))
        assert options <= known[command], f"{page.name}: infini-llama {command}{rest}"


@each_page
def test_keys_exist(page):
    known = all_keys()
    keys = {
        key
        for key in KEY.findall(page.read_text(encoding="utf-8"))
        if not key.endswith(FILE_ENDINGS)
    }
    # A user's own names and numbers, or a parameter's.
    tables = (
        "environment.env.",
        "data.sources.",
        "model.model.",
    )
    assert not [
        key for key in sorted(keys) if key not in known and not key.startswith(tables)
    ]


def test_sentences_of_the_troubleshooting_page_are_printed():
    """Each piece between the dots is part of a string of the program."""
    pieces = []
    for folder in ("configs", "flows", "tasks"):
        for file in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            pieces += [
                node.value
                for node in nodes
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    program = "\n".join(pieces)
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    sentences = [
        found
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for found in re.findall(r"`([^`]+)`", row)
    ]
    assert len(sentences) > 40
    assert not [
        one
        for one in sentences
        if not all(part.strip() in program for part in one.split("…"))
    ]


def test_papers_of_the_model_are_cited():
    named = {
        paper
        for file in (ROOT / "model").glob("*.py")
        for paper in PAPER.findall(file.read_text(encoding="utf-8"))
    }
    page = (ROOT / "docs/model.md").read_text(encoding="utf-8")
    assert len(named) > 4 and not [
        paper for paper in sorted(named) if f"arxiv.org/abs/{paper}" not in page
    ]


def test_each_answer_of_troubleshooting_names_a_key_or_a_command():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("\n## By symptom\n")[2].partition("\n## ")[0]
    rows = [
        line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")
    ][1:]
    symptoms = " ".join(row[0] for row in rows).lower()
    for symptom in (
        "loss does not fall",
        "gpu is not used",
        "out of memory",
        "slow",
        "not finite",
    ):
        assert symptom in symptoms
    assert not [
        row[0]
        for row in rows
        if not KEY.search(row[2]) and "infini-llama " not in row[2]
    ]


def test_every_figure_is_that_of_its_file():
    """Where this fails, a result or a figure was changed: run `python docs/make_numbers.py`, or benchmarks/memory.py --tables."""
    marks = [
        mark
        for page in make_numbers.PAGES
        for mark in re.findall(r"<!-- (?:table|number): (\w+) -->", read(page))
    ]
    assert len(marks) > 30
    tables = {function.__name__ for function in make_numbers.TABLES}
    # Which make_reference.py writes.
    tables |= {
        "exit_codes",
        "formats",
        "steps",
        "validations",
    }
    assert not [
        mark
        for mark in marks
        if mark not in tables | {*make_numbers.NUMBERS} | {*memory_results.TABLES}
    ]
    for page in make_numbers.PAGES:
        assert make_numbers.with_numbers(read(page)) == read(page), (
            f"{page.name} differs from benchmarks/results"
        )
        assert memory_results.with_tables(read(page)) == read(page), (
            f"{page.name} differs from benchmarks/results"
        )


def test_no_line_begins_with_the_mark_of_a_figure():
    """Python-Markdown ends the paragraph there."""
    assert not [
        page
        for page in make_numbers.PAGES
        if re.search(r"^\s*<!-- number", read(page), re.MULTILINE)
    ]


def test_a_figure_that_was_edited_by_hand_is_found():
    page = read(ROOT / "docs/performance.md")
    (figure,) = re.findall(r"<!-- number: memory_1gb -->(.+?)<!-- end -->", page)
    edited = page.replace(figure, figure.replace("1", "2", 1))
    assert make_numbers.with_numbers(edited) == page != edited
