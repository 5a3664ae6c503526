"""The model that a training starts with: its architecture, and random or pretrained weights."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import logging
from pathlib import Path

import torch

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model import hf
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.storage.hf_folder import open_folder

# Before the sigmoid: they have learned to do without a memory.
GATE_OF_TRAINED_WEIGHTS = -2.0
log = logging.getLogger("infini_llama.worker")


def build_model(
    config: LlamaConfig,
    train: TrainingConfig,
    plan: EnvironmentPlan,
    device: torch.device,
) -> Llama:
    """A model whose initial weights depend on train.seed alone, which becomes the global seed."""
    torch.manual_seed(train.seed)
    model = Llama(config, plan.attention_backend).to(device)
    model.z_loss = train.z_loss
    save_memory(model, train, plan.loss_chunk, plan.keep_attention_weights)
    init_gates(model, train)
    return model


def init_gates(model: Llama, train: TrainingConfig) -> None:
    """Set train.init_gate, or its default for weights that are trained already.

    A model without a memory has no gates: the baseline of an Infini configuration differs from it
    in model.attention alone.
    """
    gates = train.init_gate
    if gates is None and train.init_from:
        gates = GATE_OF_TRAINED_WEIGHTS
    layers = model.config.layers_with_memory
    if gates is None or not layers:
        return
    if not isinstance(gates, list):
        gates = [gates] * len(layers)
    model.set_gates(gates)


def save_memory(
    model: Llama,
    train: TrainingConfig,
    loss_chunk: int,
    keep_attention_weights: bool = True,
) -> None:
    """Set what a step computes in parts, and which activations it recomputes, not keeps."""
    model.loss_chunk = loss_chunk
    model.checkpoint_activations(train.activation_checkpointing)
    model.keep_attention_weights(keep_attention_weights)


@torch.no_grad()
def load_pretrained(model: Llama, path: Path) -> None:
    """Fill the model with the weights in a Hugging Face folder.

    Gates and maps that the folder lacks stay as they are. A sequence of one segment never reads the
    memory, so it has the outputs of the model in the folder, whatever the gates.

    Raises:
        ConfigError: the folder's tensors are not this model's.
        DataError: a file is damaged, or a weight is not finite.
    """
    folder = open_folder(path)
    shapes = folder.shapes()
    try:
        hf.check_shapes(shapes, hf.shapes(model.config), model.config)
    except ValueError as error:
        raise ConfigError(
            f"train.init_from={path} does not fit the model: {error}."
        ) from None
    parameters = dict(model.named_parameters())
    for name, tensor in folder.tensors("pt"):
        if hf.ignored(name, model.config):
            continue
        rows = parameters[name][: len(tensor)]  # not the rows that pad a vocabulary
        rows.copy_(tensor)
        extremes = torch.stack(torch.aminmax(rows))
        if not extremes.isfinite().all():
            raise DataError(
                f"train.init_from={path}: {name} has values that are not finite; "
                "use weights that are not damaged."
            )
    log.info("started from %s: %d tensors", path, len(shapes))
