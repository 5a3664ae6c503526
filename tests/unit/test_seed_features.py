"""Each feature that the seed documents name has a test (tests/seed_features.md)."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "seed_features.md").read_text(encoding="utf-8")
TEST = re.compile(
    r"`((?:unit|contracts|integration|docs|package|gpu)/[\w/]+\.py)::(\w+)`"
)


@cache
def module(file: str) -> ast.Module:
    path = TESTS / file
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    nodes = ast.walk(module(file))
    return {
        node.name: node
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def marks(file: str, test: ast.FunctionDef) -> set[str]:
    """The marks by which `make test` deselects the whole test."""
    lines = [
        ast.unparse(line)
        for line in test.decorator_list
        if "parametrize" not in ast.unparse(line)
    ]
    lines += [
        ast.unparse(line)
        for line in module(file).body
        if isinstance(line, ast.Assign) and "pytestmark" in ast.unparse(line)
    ]
    return {
        mark for mark in ("slow", "gpu") if f"pytest.mark.{mark}" in " ".join(lines)
    }


def test_each_named_test_exists_and_shows_its_mark():
    named = re.findall(TEST.pattern + r"(?: \*\((slow|gpu)\)\*)?", TABLE)
    assert len(named) > 100
    existing = {file: functions(file) for file, _, _ in named}
    assert not [
        f"{file}::{name}" for file, name, _ in named if name not in existing[file]
    ]
    wrong = [
        name
        for file, name, mark in named
        if marks(file, existing[file][name]) != ({mark} if mark else set())
    ]
    assert not wrong


def test_each_row_names_a_test_or_states_that_there_is_none():
    rows = [
        line
        for line in TABLE.splitlines()
        if line.startswith("| ") and not line.startswith(("| seed", "| feature"))
    ]
    assert not [line for line in rows if line.count("|") != 5]
    assert not [
        line for line in rows if not TEST.search(line) and "none by itself" not in line
    ]
