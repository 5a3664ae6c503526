"""Fixtures: runs with a checkpoint each, as training leaves them, but of random weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.tensors import model_tensors
from infini_llama.tasks.train.resolve import claim_run
from infini_llama.tasks.train.worker.checkpointer import save_checkpoint
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from support.records import make_plan


@pytest.fixture
def ranks(monkeypatch):
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    ranks = Ranks("cpu", "gloo")
    yield ranks
    ranks.leave()


@pytest.fixture
def run_of(built, data, ranks) -> Callable[..., tuple[Path, Llama]]:
    """make(name, **model): a run's folder with one checkpoint at step 7, and the model in it. Norms and gates are not as at first."""
    home, reference = built

    def make(name: str = "run", **model: object) -> tuple[Path, Llama]:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        wanted = {"num_key_value_heads": 2, "initializer_range": 0.2, "segment_length": 8} | model
        given = {"data": data(), "model": sizes, "runtime": {"name": name, "home": str(home)}}
        config = PipelineConfig.model_validate(given)
        fields = config.model.architecture(reference.vocab_size, reference.sequence_length) | wanted
        run = RunFolder(home / "runs" / name)
        run.path.mkdir(parents=True)
        shape = LlamaConfig.from_dict(fields)
        lineage = claim_run(config, reference, make_plan())
        run.write(run.lineage, lineage.model_copy(update={"model": shape}))
        made = Llama(shape)
        with torch.no_grad():
            for parameter_name, parameter in made.named_parameters():
                if "norm" in parameter_name:
                    parameter.uniform_(0.5, 1.5)
                if parameter_name.endswith(".gate"):
                    parameter.normal_()
        scalars = {
            "step": 7,
            "samples": 7 * 32,
            "tokens": 3584,
            "validation_loss": 5.5,
            "best_validation_loss": 5.5,
            "skips": [],
            "world_size": 1,
            "model": fields,
            "dataset": reference.digest,
        }
        save_checkpoint(run.checkpoints, 7, model_tensors(made), scalars)
        line = {"kind": "validation", "step": 7, "loss": 5.5, "bits_per_byte": 2.25}
        run.metrics.write_text(json.dumps(line) + "\n")
        return run.path, made.eval()

    return make
