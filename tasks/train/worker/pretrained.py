"""Weights of another model as those that a run starts with."""

import logging
from pathlib import Path

import torch

from infini_llama.configs.errors import ConfigError
from infini_llama.model import hf
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.hf_folder import open_folder

log = logging.getLogger("infini_llama.worker")


@torch.no_grad()
def load_pretrained(model: Llama, path: Path, gate: float) -> None:
    """Fills the model with the weights in a Hugging Face folder; gates that it has not are set to `gate`.

    A row of one segment at most never reads a memory, so it has the outputs of the model in the folder, whatever the gates.

    Raises:
        ConfigError: the folder's tensors are not this model's.
        DataError: a file is damaged.
    """
    folder = open_folder(path)
    found = folder.shapes()
    try:
        hf.check_shapes(found, model.config)
    except ValueError as error:
        raise ConfigError(f"train.init_from={path} does not fit the model: {error}.") from None
    parameters = dict(model.named_parameters())
    for name, tensor in folder.tensors("pt"):
        if not hf.ignored(name, model.config):
            parameters[name].copy_(tensor)
    new = [name for name in parameters if hf.is_gate(name) and name not in found]
    for name in new:
        parameters[name].fill_(gate)
    log.info("started from %s: %d tensors%s", path, len(found), f", gates at {gate:g}" if new else "")
