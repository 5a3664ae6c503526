"""Who may import whom (docs/architecture), read from every file's syntax tree."""

import ast
import sys
import tomllib
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("flows", "tasks", "model", "configs")


def files_of(*packages: str) -> list[Path]:
    return [
        path for package in packages for path in sorted((ROOT / package).rglob("*.py"))
    ]


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
            found |= {
                str(node.module),
                *(f"{node.module}.{alias.name}" for alias in node.names),
            }
    return {name.removeprefix("infini_llama.") for name in found}


def packages(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_the_layout_exists():
    assert all(len(files_of(package)) > 3 for package in OURS)


def test_only_flows_and_task_files_import_prefect():
    users = {
        path.relative_to(ROOT)
        for path in files_of(*OURS)
        if "prefect" in packages(imported(path))
    }
    strangers = [
        path for path in users if path.parts[0] != "flows" and path.name != "task.py"
    ]
    assert users and not strangers


def test_quick_tests_import_neither_transformers_nor_prefect():
    """Nor a module of this project that imports Prefect at its top."""
    slow = {"prefect", "transformers", "datasets"}
    for path in files_of("flows", "tasks"):
        names = {
            name.name
            for node in tree(path).body
            if isinstance(node, ast.Import)
            for name in node.names
        }
        names |= {
            str(node.module)
            for node in tree(path).body
            if isinstance(node, ast.ImportFrom)
        }
        if "prefect" in packages(names):
            slow.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    tests = [
        *(ROOT / "tests/unit").rglob("*.py"),
        *(ROOT / "tests/contracts").rglob("*.py"),
    ]
    assert len(slow) > 5 and not [path for path in tests if slow & imported(path)]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("configs", {"flows", "tasks"}),
        ("tasks", {"flows"}),
    ],
)
def test_imports_run_one_way(package, forbidden):
    wrong = [path for path in files_of(package) if packages(imported(path)) & forbidden]
    assert not wrong


def test_configs_import_of_the_model_its_architecture_alone():
    """Which has no torch."""
    names = {name for path in files_of("configs") for name in imported(path)}
    of_model = {name for name in names if name.split(".")[0] == "model"}
    assert of_model and all(name.startswith("model.config") for name in of_model)
    assert "torch" not in packages(imported(ROOT / "model/config.py"))


def test_every_module_can_be_the_first_that_is_imported():
    """A circle of imports fails only where it is entered at the wrong module."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in files_of(*OURS)
    }
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        statements = tree(path).body
        found = [
            node
            for node in statements
            if isinstance(node, ast.ImportFrom) and node.module
        ]
        names = {
            f"{node.module}.{alias.name}" for node in found for alias in node.names
        }
        names |= {str(node.module) for node in found}
        graph[name] = {
            name.removeprefix("infini_llama.") for name in names
        } & paths.keys() - {name}
    assert (
        len(list(TopologicalSorter(graph).static_order())) == len(paths)
        and sum(map(len, graph.values())) > 500
    )


def test_stages_do_not_import_task_files():
    for path in files_of("tasks"):
        assert not {
            name
            for name in imported(path)
            if name.startswith("tasks.") and name.endswith(".task")
        }, path


def test_the_supervisor_imports_nothing_of_the_worker():
    for path in (ROOT / "tasks/train").glob("*.py"):
        assert not {
            name for name in imported(path) if name.startswith("tasks.train.worker")
        }, path


def test_the_model_imports_torch_and_the_standard_library_only():
    allowed = set(sys.stdlib_module_names) | {"torch", "model", "infini_llama"}
    for path in files_of("model"):
        assert packages(imported(path)) <= allowed, path


def test_the_packages_that_pyright_checks_strictly_are_there():
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"][
        "strict"
    ]
    assert len(strict) == 5 and all(
        (ROOT / folder / "__init__.py").is_file() for folder in strict
    )


# No package below tasks/ imports a package that imports it, directly or through others.


@cache
def imports_between_packages() -> dict[str, set[str]]:
    """The packages that each package below tasks/ imports, by dotted name."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in files_of("tasks")
    }
    packages = {
        name.removesuffix(".__init__") for name in modules if name.endswith(".__init__")
    }
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        home = name.rpartition(".")[0]
        for node in ast.walk(tree(path)):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            for target in (target.removeprefix("infini_llama.") for target in targets):
                owner = next(
                    (
                        part
                        for part in (target, target.rpartition(".")[0])
                        if part in modules or part in packages
                    ),
                    None,
                )
                if owner is not None:
                    arrows[home].add(
                        owner if owner in packages else owner.rpartition(".")[0]
                    )
    return {
        home: {other for other in found if other != home}
        for home, found in arrows.items()
    }


def test_no_packages_import_each_other():
    arrows = imports_between_packages()
    assert (
        "tasks.storage" in arrows["tasks.runs"]
        and "tasks.train.worker.callbacks" in arrows
    )
    # Raises a CycleError that names the packages of a circle.
    TopologicalSorter(arrows).prepare()


def test_records_storage_tokenizers_and_runs_import_downwards_only():
    arrows = imports_between_packages()
    lower = {"tasks"}
    for layer in ("tasks.records", "tasks.storage", "tasks.tokenizers", "tasks.runs"):
        assert arrows.get(layer, set()) <= lower, layer
        lower.add(layer)


def test_the_worker_does_not_import_its_supervisor():
    arrows = imports_between_packages()
    of_worker = [
        package for package in arrows if package.startswith("tasks.train.worker")
    ]
    for package in of_worker:
        assert "tasks.train" not in arrows[package], package
