"""Exports of runs of random weights."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infini_llama.model.llama import Llama
from infini_llama.tasks.export.exporting import export


@pytest.fixture
def export_of(run_of, tmp_path) -> Callable[..., tuple[Path, Llama]]:
    """export_of(**model): the folder of an exported run, and the model in it."""

    def make(**changes: object) -> tuple[Path, Llama]:
        run, model = run_of(**changes)
        export(run, tmp_path / "out", checkpoint="latest", dtype="float32", max_shard_size="5GB")
        return tmp_path / "out", model

    return make
