"""Runs with a checkpoint, as training leaves them, but of random weights."""

from pathlib import Path

import torch

from infini_llama.configs.schema import DataConfig, PipelineConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.metrics import ValidationLine
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.tensors import model_tensors
from infini_llama.tasks.train.binding import bind_run
from infini_llama.tasks.train.worker.checkpointer import save_checkpoint
from support.records import make_plan


def trained_run(
    home: Path,
    dataset: DatasetRef,
    data: DataConfig,
    name: str = "run",
    **model: object,
) -> tuple[Path, Llama]:
    """A run's folder with one checkpoint at step 7, and the model in it. Norms, gates and maps are not as at first."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    wanted = {
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "segment_length": 8,
    } | model
    given = {"data": data, "model": sizes, "runtime": {"name": name, "home": str(home)}}
    config = PipelineConfig.model_validate(given)
    fields = (
        config.model.architecture(dataset.vocab_size, dataset.sequence_length) | wanted
    )
    run = RunFolder(home / "runs" / name)
    run.path.mkdir(parents=True)
    shape = LlamaConfig(**fields)
    lineage = bind_run(config, dataset, make_plan())
    run.write(run.lineage, lineage.model_copy(update={"model": shape}))
    made = Llama(shape)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            if parameter_name.endswith(".gate"):
                parameter.normal_()
            if ".memory_" in parameter_name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    state = TrainState(
        step=7, samples=7 * 32, tokens=3584, model=fields, dataset=dataset.digest
    )
    state.record_validation(5.5)
    save_checkpoint(run.checkpoints, 7, model_tensors(made), state.to_json())
    run.metrics.write_text(
        ValidationLine(step=7, loss=5.5, bits_per_byte=2.25).model_dump_json() + "\n"
    )
    return run.path, made.eval()
