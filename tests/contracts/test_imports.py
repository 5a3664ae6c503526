"""Who may import whom (docs/architecture): seen in fresh interpreters, and read from every file's syntax tree."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from infini_llama.configs.schema import DataConfig
from infini_llama.flows.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
OURS = ("flows", "tasks", "model", "configs")


def files_of(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere in it, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("infini_llama.") for name in found}


def packages(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules of a fresh interpreter after a statement."""
    script = f"{statement}\nimport sys; print(*sorted({{name.removeprefix('infini_llama.').split('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_the_layout_exists():
    assert all(len(files_of(package)) > 3 for package in OURS)


def test_only_flows_and_task_files_import_prefect():
    users = {path.relative_to(ROOT) for path in files_of(*OURS) if "prefect" in packages(imported(path))}
    strangers = [path for path in users if path.parts[0] != "flows" and path.name != "task.py"]
    assert users and not strangers


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
        statements = ast.parse(path.read_text(encoding="utf-8")).body
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


def test_a_worker_does_not_import_the_pipeline():
    loaded = loaded_by("import infini_llama.tasks.train.worker.__main__, infini_llama.tasks.train.worker.rank")
    assert "torch" in loaded
    assert not loaded & {"prefect", "datasets", "transformers", "flows"}


def test_the_supervisor_needs_no_torch():
    assert not loaded_by("import infini_llama.tasks.train.stage, infini_llama.flows.pipeline") & {
        "torch",
        "prefect",
        "datasets",
        "transformers",
    }


def test_preparing_data_on_a_cpu_imports_no_torch(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number} of the corpus\n" * 20)
    settings = {"files": [f"{tmp_path}/*.txt"], "validation_fraction": 0.2, "sequence_length": 16, "device": "cpu"}
    data = DataConfig.model_validate(settings | {"tokenizer": {"vocab_size": 300}}).model_dump(mode="json")
    loaded = loaded_by(
        "from pathlib import Path\nfrom infini_llama.configs.schema import DataConfig\n"
        "from infini_llama.tasks.preprocess.stage import preprocess\nfrom infini_llama.tasks.verify_data.checks import verify\n"
        f"home = Path({str(tmp_path / 'home')!r})\n"
        f"verify(preprocess(DataConfig.model_validate({data!r}), home), home, 'deep', 0)"
    )
    assert "tokenizers" in loaded
    assert not loaded & {"torch", "prefect", "datasets", "transformers"}


def test_help_imports_nothing_heavy():
    """Of any command, in one interpreter."""
    commands = [[], *([name] for name in COMMANDS)]
    loaded = loaded_by(
        "from infini_llama.flows.cli.main import main\n"
        f"for words in {commands}:\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as leave: assert leave.code == 0"
    )
    heavy = {
        "torch",
        "prefect",
        "datasets",
        "transformers",
        "pydantic",
        "numpy",
        "yaml",
        "rich",
        "tokenizers",
        "pyarrow",
    }
    assert not loaded & heavy


def test_without_a_mirror_fsspec_is_not_even_imported():
    config = "PipelineConfig(data=DataConfig(source='python-stdlib'))"
    script = (
        "from infini_llama import DataConfig, PipelineConfig\nfrom infini_llama.tasks.runs.mirror import mirrored\n"
    )
    assert "fsspec" not in loaded_by(f"{script}with mirrored({config}, None): pass")


def test_importing_configs_is_cheap():
    assert "pydantic" not in loaded_by("import infini_llama.configs")
    assert not loaded_by("import infini_llama.configs.loading") & {"torch", "prefect", "datasets", "numpy"}


def test_a_rank_dies_with_torchrun_before_it_imports_anything_heavy():
    """A rank that is stopped before that would outlive torchrun, and keep the run's lock."""
    assert not loaded_by("import infini_llama.tasks.train.worker.__main__") & {"pydantic", "numpy", "torch"}


def test_the_sections_are_imported_from_configs_in_a_fresh_interpreter():
    assert "pydantic" in loaded_by("from infini_llama import DataConfig, PipelineConfig")
    missing = "import configs\ntry: configs.NoSuchName\nexcept AttributeError: pass\nelse: raise SystemExit(1)"
    assert "configs" in loaded_by(missing)


def test_the_packages_that_pyright_checks_strictly_are_there():
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
    assert len(strict) == 5 and all((ROOT / folder / "__init__.py").is_file() for folder in strict)
