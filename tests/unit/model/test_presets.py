"""How large the ready configurations are: the counts that their first lines state."""

from pathlib import Path

import pytest
import torch

from infini_llama import configs
from infini_llama.configs.loading import load_config
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny_20m", 19_172_608),
        ("small", 123_587_328),
        ("medium", 353_551_360),
        ("large", 813_442_560),
        ("xl", 1_545_996_288),
        ("3b", 3_127_815_168),
        ("6b", 6_083_055_616),
        ("7b", 6_989_025_280),
    ],
)
def test_parameters_of_a_preset(name, parameters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the packaged file is meant
    config = load_config(f"configs/{name}.yaml")
    fields = config.model.model_dump()
    fields["num_key_value_heads"] = (
        fields["num_key_value_heads"] or fields["num_attention_heads"]
    )
    sizes = {
        "vocab_size": config.data.tokenizer.vocab_size,
        "max_position_embeddings": config.data.sequence_length,
    }
    with torch.device("meta"):
        model = Llama(LlamaConfig(**(fields | sizes)))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters

    first_line = Path(configs.__path__[0], f"{name}.yaml").read_text().splitlines()[0]
    assert f"{parameters:,} parameters" in first_line


@pytest.mark.parametrize("name", ["3b", "6b", "7b"])
def test_a_preset_beyond_one_gpu_is_split_and_computes_activations_again(name):
    train = load_config(Path(configs.__path__[0], f"{name}.yaml")).train
    assert (train.parallel, train.activation_checkpointing) == ("fsdp", "full")
