"""No package below tasks/ imports a package that imports it, directly or through others (docs/architecture.md)."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def imports_between_packages(root: Path) -> dict[str, set[str]]:
    """The packages that each package below `root`/tasks imports, by dotted name."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in (root / "tasks").rglob("*.py")}
    packages = {name.removesuffix(".__init__") for name in modules if name.endswith(".__init__")}
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        home = name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            for target in (target.removeprefix("infini_llama.") for target in targets):
                owner = next(
                    (part for part in (target, target.rpartition(".")[0]) if part in modules or part in packages), None
                )
                if owner is not None:
                    arrows[home].add(owner if owner in packages else owner.rpartition(".")[0])
    return {home: {other for other in found if other != home} for home, found in arrows.items()}


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Pairs of packages that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for following in arrows.get(waiting.pop(), set()) - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reach = {package: reached(package) for package in arrows}
    return sorted(f"{a} <-> {b}" for a in reach for b in reach if a < b and b in reach[a] and a in reach[b])


def test_no_packages_import_each_other():
    arrows = imports_between_packages(ROOT)
    assert {"tasks.storage", "tasks.runs", "tasks.train", "tasks.train.worker"} <= set(arrows)
    assert circles(arrows) == []


def test_a_circle_is_found(tmp_path):
    for package, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        folder = tmp_path / "tasks" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "code.py").write_text(f"def f():\n    from infini_llama.tasks.{other}.code import f\n")
    assert circles(imports_between_packages(tmp_path)) == [
        "tasks.a <-> tasks.b",
        "tasks.a <-> tasks.c",
        "tasks.b <-> tasks.c",
    ]


def allowed(layer: str) -> set[str]:
    """The layers that packages of this layer may import (outside train's own packages)."""
    order = ["records", "storage", "runs"]
    return set(order[: order.index(layer)]) if layer in order else set(order)


def test_records_storage_and_runs_import_downwards_only():
    arrows = imports_between_packages(ROOT)
    for layer in ("records", "storage", "runs"):
        lower = {f"tasks.{name}" for name in allowed(layer)} | {"tasks"}
        assert arrows.get(f"tasks.{layer}", set()) <= lower, layer


def test_the_worker_does_not_import_its_supervisor():
    arrows = imports_between_packages(ROOT)
    assert "tasks.train" not in arrows["tasks.train.worker"]
