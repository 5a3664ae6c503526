"""The memory of a training step, by carrying one out on tensors that have sizes but no memory.

It is the model's own code that runs, so the count follows it: attention, checkpointing, the loss, mixed precision.
"""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.model.split import Split
from infini_llama.tasks.estimate.live import LiveBytes
from infini_llama.tasks.train.worker.build import save_memory
from infini_llama.tasks.train.worker.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.native import LossModule
from infini_llama.tasks.train.worker.tensor import placement

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "batches")
# The strategies whose rows are cut from the token stream: every label counts, so that labels are a view of the inputs' tensor.
WITHOUT_MASK = ("concat", "window")


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
    parts: int = 1  # workers that share a model

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the parameters, in shards of one where models are shared and copied."""
        return self.shards > 1 or 1 < self.parts < self.workers


class Counted(Split):
    """Ranks that exchange nothing: each computes its part from plain parameters of its sizes."""

    def part(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def of_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x] * self.size)


def step_memory(config: LlamaConfig, train: dict, layout: Layout) -> dict[str, int]:
    """Bytes of one worker at the moment of a step at which it holds most, by part.

    activations: everything that forward and backward keep or make on the way, but for logits (every tensor over the vocabulary, the
    loss's included). batches: the token ids of one micro-batch; `batch_memory` has those of a step. Under fsdp and hsdp weights are
    a worker's share and what is gathered at a time: the embedding, head and
    final norm, and two layers, or all of them where they are not given back after the forward pass; the largest layer's gradients
    come in whole before each worker keeps its share.
    """
    with torch.device("meta"):
        model = Llama(config)
    if layout.parts > 1:
        keep_part(model, Counted(None, 0, layout.parts))  # type: ignore[arg-type]
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
                phase = "batches"
                shape = (layout.micro_batch_size, layout.sequence_length)
                inputs, labels = (torch.empty(shape, dtype=torch.long) for _ in range(2))
                phase = "activations"
                _accumulate(module, inputs, labels, layout)
                del inputs, labels
            phase = "optimizer"
            if not layout.sharded:
                optimizer.step()
                if layout.workers == layout.parts:
                    optimizer.zero_grad(set_to_none=True)
        peak = {part: live.peak[part] for part in PARTS}
    return _sharded(peak, model, layout) if layout.sharded else peak


def keep_part(model: Llama, split: Split) -> None:
    """Makes the parameters as large as those of one rank of the `split`."""
    model.compute_with(split)
    for prefix, module in model.named_modules():
        for name, value in list(module.named_parameters(recurse=False)):
            place, sizes = placement(f"{prefix}.{name}", model.words is not None), list(value.shape)
            if isinstance(place, Shard):
                sizes[place.dim] //= split.size
            setattr(module, name, torch.nn.Parameter(value.new_empty(sizes)))
    model.tie_weights()


def _keep_gradient(parameter: torch.nn.Parameter, live: LiveBytes, layout: Layout) -> None:
    """As the strategy keeps it: alone, freed after each step; under DDP in buckets that stay; under FSDP only a share."""
    if layout.sharded:
        parameter.register_post_accumulate_grad_hook(lambda value: setattr(value, "grad", None))
        return
    if layout.workers > layout.parts:
        parameter.grad = torch.zeros_like(parameter)
        live.name(parameter.grad, "gradients")
        return

    def named(value: torch.Tensor) -> None:
        assert value.grad is not None
        live.name(value.grad, "gradients")

    parameter.register_post_accumulate_grad_hook(named)


def batch_memory(data: dict, train: dict, layout: Layout) -> int:
    """Bytes of a step's batches on the worker's device: all of its micro-batches are there at once.

    On a CPU the steps that data threads build ahead lie in the same memory. Ids and labels are int64, documents int32; ranks that
    share a row each have the whole row.
    """
    length = data["sequence_length"]
    row = 8 * (length + 1)
    if data["strategy"] not in WITHOUT_MASK:
        row += 8 * length  # labels of their own, some masked
    if train["document_isolation"]:
        row += 4 * length
    steps = 1 + train["dataloader_num_workers"] if layout.device == "cpu" else 1
    return steps * layout.micro_batches * layout.micro_batch_size * row


def _accumulate(module: LossModule, inputs: torch.Tensor, labels: torch.Tensor, layout: Layout) -> None:
    """Forward and backward of one micro-batch."""
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
