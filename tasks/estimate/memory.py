"""The memory of a training step, by carrying one out on tensors that have sizes but no memory.

It is the model's own code that runs, so the count follows it: attention, checkpointing, the loss, mixed precision.
"""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.estimate.live import LiveBytes
from infini_llama.tasks.train.worker.build import save_memory
from infini_llama.tasks.train.worker.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.native import LossModule

PARTS = ("weights", "gradients", "optimizer", "activations", "logits")


@dataclass(frozen=True)
class Layout:
    """How a run lies on its workers: what of `train` and the plan decides memory."""

    micro_batch_size: int
    sequence_length: int
    micro_batches: int
    workers: int
    shards: int
    reshard_after_forward: bool
    precision: str
    device: str
    loss_chunk: int


def step_memory(config: LlamaConfig, train: dict, layout: Layout) -> dict[str, int]:
    """Bytes of one worker at the moment of a step at which it holds most, by part.

    activations: everything that forward and backward keep or make on the way, but for logits (every tensor over the vocabulary, the
    loss's included). Under fsdp and hsdp weights are a worker's share and what is gathered at a time: the embedding, head and
    final norm, and two layers, or all of them where they are not given back after the forward pass; the largest layer's gradients
    come in whole before each worker keeps its share.
    """
    with torch.device("meta"):
        model = Llama(config)
    vocabulary = len(model.lm_head.weight)

    def kind_of(tensor: torch.Tensor) -> str:
        return "logits" if tensor.ndim > 1 and tensor.shape[-1] == vocabulary else phase

    phase = "weights"
    with FakeTensorMode(), LiveBytes(kind_of) as live:
        weights = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in model.named_parameters()}
        for tensor in weights.values():
            live.name(tensor, "weights")
        model.load_state_dict(weights, assign=True, strict=False)  # a tied head is not in it
        model.tie_weights()
        del weights
        save_memory(model, train, layout.loss_chunk)
        optimizer = build_optimizer(model, train)
        module = LossModule(model)
        phase = "gradients"
        for parameter in model.parameters():
            _keep_gradient(parameter, live, layout)
        for _ in range(2):  # the optimizer has its state from the first step on
            live.begin()
            phase = "activations"
            for _ in range(min(2, layout.micro_batches)):
                _accumulate(module, layout)
            phase = "optimizer"
            if not layout.shards > 1:
                optimizer.step()
                if layout.workers == 1:
                    optimizer.zero_grad(set_to_none=True)
        peak = {part: live.peak[part] for part in PARTS}
    return _sharded(peak, model, layout) if layout.shards > 1 else peak


def _keep_gradient(parameter: torch.nn.Parameter, live: LiveBytes, layout: Layout) -> None:
    """As the strategy keeps it: alone, freed after each step; under DDP in buckets that stay; under FSDP only a share."""
    if layout.shards > 1:
        parameter.register_post_accumulate_grad_hook(lambda value: setattr(value, "grad", None))
        return
    if layout.workers > 1:
        parameter.grad = torch.zeros_like(parameter)
        live.name(parameter.grad, "gradients")
        return

    def named(value: torch.Tensor) -> None:
        assert value.grad is not None
        live.name(value.grad, "gradients")

    parameter.register_post_accumulate_grad_hook(named)


def _accumulate(module: LossModule, layout: Layout) -> None:
    """Forward and backward of one micro-batch."""
    shape = (layout.micro_batch_size, layout.sequence_length)
    inputs, labels = (torch.empty(shape, dtype=torch.long) for _ in range(2))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(layout.precision, torch.bfloat16)
    with torch.autocast("cpu", dtype=half, enabled=layout.precision != "fp32"):
        loss = module(inputs, labels)
    loss.backward()


def _sharded(peak: dict[str, int], model: Llama, layout: Layout) -> dict[str, int]:
    """The parts of one of `shards` workers, from a step in which no gradient was kept."""
    layers = [sum(value.nbytes for value in layer.parameters()) for layer in model.model.layers]
    total = sum(value.nbytes for value in model.parameters())
    root = total - sum(layers)
    gathered = root + (2 * max(layers) if layout.reshard_after_forward else sum(layers))
    share = total // layout.shards
    arriving = max(*layers, root)
    return peak | {"weights": share + gathered, "gradients": share + arriving, "optimizer": 2 * share}
