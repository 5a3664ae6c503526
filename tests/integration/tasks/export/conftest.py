"""Exports of runs of random weights, and folders that transformers wrote."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infini_llama.model.llama import Llama
from infini_llama.tasks.export.exporting import export

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def export_of(run_of, tmp_path) -> Callable[..., tuple[Path, Llama]]:
    """export_of(**model): the folder of an exported run, and the model in it."""

    def make(**changes: object) -> tuple[Path, Llama]:
        run, model = run_of(**changes)
        export(
            run,
            tmp_path / "out",
            checkpoint="latest",
            dtype="float32",
            max_shard_size="5GB",
        )
        return tmp_path / "out", model

    return make


@pytest.fixture
def theirs(built, tmp_path) -> Callable[..., tuple[Path, LlamaForCausalLM]]:
    """A folder that transformers wrote, with the dataset's tokenizer, and the model in it."""
    home, reference = built

    def make(shard: str = "5GB", **changes: object) -> tuple[Path, LlamaForCausalLM]:
        torch.manual_seed(1)
        fields = {
            "vocab_size": reference.vocab_size + 12,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
        }
        model = LlamaForCausalLM(LlamaConfig(**(SIZES | fields | changes))).eval()
        model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
        shutil.copy(home / reference.path / "tokenizer.json", tmp_path / "theirs")
        return tmp_path / "theirs", model

    return make
