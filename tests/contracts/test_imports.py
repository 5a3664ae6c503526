"""Who may import whom (docs/architecture), read from every file's syntax tree."""

import ast
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("flows", "tasks", "model", "configs")


def files_of(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere in it, also inside functions."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("infini_llama.") for name in found}


def packages(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_the_layout_exists():
    assert all(len(files_of(package)) > 3 for package in OURS)


def test_only_flows_and_task_files_import_prefect():
    users = {path.relative_to(ROOT) for path in files_of(*OURS) if "prefect" in packages(imported(path))}
    strangers = [path for path in users if path.parts[0] != "flows" and path.name != "task.py"]
    assert users and not strangers


def test_quick_tests_import_neither_transformers_nor_prefect():
    """Nor a module of this project that imports Prefect at its top."""
    slow = {"prefect", "transformers", "datasets"}
    for path in files_of("flows", "tasks"):
        names = {name.name for node in tree(path).body if isinstance(node, ast.Import) for name in node.names}
        names |= {str(node.module) for node in tree(path).body if isinstance(node, ast.ImportFrom)}
        if "prefect" in packages(names):
            slow.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    tests = [*(ROOT / "tests/unit").rglob("*.py"), *(ROOT / "tests/contracts").rglob("*.py")]
    assert len(slow) > 5 and not [path for path in tests if slow & imported(path)]


def test_only_task_files_of_a_stage_import_prefect():
    folders = {path.parent for path in files_of("tasks") if path.name == "task.py"}
    assert {folder.name for folder in folders} >= {"preprocess", "verify_data", "patch_environment", "train"}


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("configs", {"flows", "tasks", "model"}), ("model", {"flows", "tasks", "configs"}), ("tasks", {"flows"})],
)
def test_imports_run_one_way(package, forbidden):
    wrong = [path for path in files_of(package) if packages(imported(path)) & forbidden]
    assert not wrong


def test_every_module_can_be_the_first_that_is_imported():
    """A circle of imports fails only where it is entered at the wrong module."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files_of(*OURS)}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        statements = tree(path).body
        found = [node for node in statements if isinstance(node, ast.ImportFrom) and node.module]
        names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
        names |= {str(node.module) for node in found}
        graph[name] = {name.removeprefix("infini_llama.") for name in names} & paths.keys() - {name}
    assert len(list(TopologicalSorter(graph).static_order())) == len(paths) and sum(map(len, graph.values())) > 500


def test_stages_do_not_import_task_files():
    for path in files_of("tasks"):
        assert not {name for name in imported(path) if name.startswith("tasks.") and name.endswith(".task")}, path


def test_the_model_imports_torch_and_the_standard_library_only():
    allowed = set(sys.stdlib_module_names) | {"torch", "model", "infini_llama"}
    for path in files_of("model"):
        assert packages(imported(path)) <= allowed, path


def test_the_packages_that_pyright_checks_strictly_are_there():
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
    assert len(strict) == 5 and all((ROOT / folder / "__init__.py").is_file() for folder in strict)
