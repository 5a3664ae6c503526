"""What a fresh interpreter has loaded after a statement: nothing heavy where it is not needed (docs/architecture)."""

import subprocess
import sys
from pathlib import Path

from infini_llama.configs.schema import DataConfig
from infini_llama.flows.cli.commands import COMMANDS

ROOT = Path(__file__).parents[3]


def loaded_by(statement: str) -> set[str]:
    """Modules of a fresh interpreter after a statement: their full names, without this package's, and those of their packages."""
    names = "{name.removeprefix('infini_llama.') for name in sys.modules}"
    script = f"{statement}\nimport sys; names = {names}; print(*sorted(names | {{name.split('.')[0] for name in names}}))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_a_worker_does_not_import_the_pipeline():
    loaded = loaded_by(
        "import infini_llama.tasks.train.worker.__main__, infini_llama.tasks.train.worker.rank"
    )
    assert "torch" in loaded
    assert not loaded & {"prefect", "datasets", "transformers", "flows"}


def test_the_supervisor_needs_no_torch():
    assert not loaded_by(
        "import infini_llama.tasks.train.stage, infini_llama.flows.pipeline"
    ) & {
        "torch",
        "prefect",
        "datasets",
        "transformers",
    }


def test_preparing_data_on_a_cpu_imports_only_what_it_uses(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number} of the corpus\n" * 20)
    settings = {
        "files": [f"{tmp_path}/*.txt"],
        "validation_fraction": 0.2,
        "sequence_length": 16,
        "device": "cpu",
    }
    data = DataConfig.model_validate(
        settings | {"tokenizer": {"vocab_size": 300}}
    ).model_dump(mode="json")
    loaded = loaded_by(
        "from pathlib import Path\nfrom infini_llama.configs.schema import DataConfig\n"
        "from infini_llama.tasks.preprocess.stage import preprocess\nfrom infini_llama.tasks.verify_data.checks import verify\n"
        f"home = Path({str(tmp_path / 'home')!r})\n"
        f"verify(preprocess(DataConfig.model_validate({data!r}), home), home, 'deep', 0)"
    )
    assert "tokenizers" in loaded and "pyarrow.lib" in loaded
    assert not loaded & {
        "torch",
        "prefect",
        "datasets",
        "transformers",
        "pandas",
        "fsspec",
        "huggingface_hub",
    }
    assert not loaded & {
        "pyarrow.parquet",
        "pyarrow.fs",
        "pyarrow.dataset",
        "concurrent.futures.process",
        "dask",
        "ray",
    }


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
    script = "from infini_llama import DataConfig, PipelineConfig\nfrom infini_llama.tasks.runs.mirror import mirrored\n"
    assert "fsspec" not in loaded_by(f"{script}with mirrored({config}, None): pass")


def test_importing_configs_is_cheap():
    assert "pydantic" not in loaded_by("import infini_llama.configs")
    assert not loaded_by("import infini_llama.configs.loading") & {
        "torch",
        "prefect",
        "datasets",
        "numpy",
    }


def test_a_rank_dies_with_torchrun_before_it_imports_anything_heavy():
    """A rank that is stopped before that would outlive torchrun, and keep the run's lock."""
    assert not loaded_by("import infini_llama.tasks.train.worker.__main__") & {
        "pydantic",
        "numpy",
        "torch",
    }


def test_the_sections_are_imported_from_configs_in_a_fresh_interpreter():
    assert "pydantic" in loaded_by(
        "from infini_llama import DataConfig, PipelineConfig"
    )
    missing = "import configs\ntry: configs.NoSuchName\nexcept AttributeError: pass\nelse: raise SystemExit(1)"
    assert "configs" in loaded_by(missing)
