"""The needs of a run, before it is started: memory of a worker, and disk space for checkpoints."""

from dataclasses import replace

from infini_llama.configs.optimizers import OPTIMIZERS
from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.model.config import (
    LlamaConfig,
    first_trained_layer,
    parameters,
    trained_layer_matrices,
    trained_parameters,
)
from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.records.machine import Disk, MachineFacts
from infini_llama.tasks.records.plan import Device, EnvironmentPlan, Finding, Precision, finding

GIB = 1024**3
# Of what is free, for what no estimate sees: fragments, kernels' workspaces, Python and its libraries.
SHARE, FIXED = 0.8, 1 * GIB
# Bytes of fp32 logits of one micro-batch from which they are computed in parts. On a CPU a part is the largest power of two of
# tokens whose logits take so many bytes: the head's weights and gradient are read for each, so that smaller parts are slower, even
# such as a cache holds (benchmarks/loss.py). On a GPU it has so many tokens.
LARGE_LOGITS = {"cpu": 32 * 2**20, "cuda": 2**30}
CPU_CHUNK_BYTES, GPU_CHUNK = 128 * 2**20, 4096


def moment_bytes(model: LlamaConfig, train: TrainingConfig) -> int:
    """Bytes of the optimizer's moments, of the weights that are trained."""
    optimizer, matrices = (
        OPTIMIZERS[train.optimizer],
        trained_layer_matrices(model, train.frozen_layers),
    )
    others = trained_parameters(model, train.frozen_layers) - matrices
    return 4 * (optimizer.matrix_moments * matrices + optimizer.moments * others)


def checkpoint_bytes(model: LlamaConfig, train: TrainingConfig) -> int:
    """Weights in fp32, and the optimizer's moments."""
    return 4 * parameters(model) + moment_bytes(model, train)


def model_of(config: PipelineConfig) -> LlamaConfig:
    """The run's model, with the vocabulary size of the configuration."""
    data = config.data
    return LlamaConfig(**config.model.architecture(data.tokenizer.vocab_size, data.sequence_length))


def attended_tokens(config: PipelineConfig) -> int:
    """Tokens of a row or segment, inside which softmax attention is computed."""
    length = config.data.sequence_length
    return (
        length if config.model.attention == "softmax" else min(length, config.model.segment_length)
    )


def chunk_of(config: PipelineConfig, device: Device, tokens: int) -> int:
    """`train.loss_chunk`, for auto by rule: tokens of a micro-batch (of `tokens` tokens) whose logits exist at a time; 0: all."""
    if config.train.loss_chunk != "auto":
        return config.train.loss_chunk
    vocab_size = config.data.tokenizer.vocab_size
    if 4 * tokens * vocab_size <= LARGE_LOGITS[device]:
        return 0
    return (
        GPU_CHUNK
        if device == "cuda"
        else 1 << ((CPU_CHUNK_BYTES // (4 * vocab_size)).bit_length() - 1)
    )


def bytes_needed(
    config: PipelineConfig,
    micro: int,
    precision: Precision,
    device: Device,
    workers_per_node: int,
    nodes: int = 1,
    keeps_attention_weights: bool = False,
) -> dict[str, int]:
    """{"weights", "gradients", "optimizer", "activations", "logits", "batches"} in bytes of one worker.

    Weights, gradients and the optimizer's moments are fp32: with Adam 16 bytes per parameter (Rajbhandari et al. 2020, arXiv
    1910.02054, section 3.1).
    Under fsdp and hsdp a worker has its share of each, what is gathered of the weights at a time (embedding, head and final norm, and two
    layers, or all where they are kept after the forward pass), and the largest gradient before it is split. Activations are what a layer
    keeps per token for its backward pass: its two inputs and norms in fp32, queries, keys, values and the products inside the MLP in the
    type computed in (after Korthikanti et al. 2022, arXiv 2205.05198, eq. 1), with `keeps_attention_weights` the softmax weights;
    of Infini-attention also features, reads and memories, which are fp32. Layers below the first trained one have weights alone.
    """
    model, train = model_of(config), config.train
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    half = 4 if precision == "fp32" else 2
    tokens = micro * config.data.sequence_length // train.context_parallel
    q_width = model.num_attention_heads * model.head_size
    kept = 4 * 4 * width + half * (4 * width + 4 * q_width + 4 * inner)
    kv_width, copies = model.num_key_value_heads * model.head_size, 0 if half == 4 else 2
    kept_of_memory = 4 * ((2 + 2 * copies) * q_width + (2 + copies) * kv_width)
    kept_of_memory += 3 * 4 * kv_width * (model.head_size + 1) // model.segment_length
    first = first_trained_layer(model, train.frozen_layers)
    memories = sum(layer >= first for layer in model.layers_with_memory)
    layers_kept = (
        layers - first
    )  # whose backward pass is computed, also where their own weights are frozen
    if keeps_attention_weights:  # of half of the pairs, and of half a block of queries
        kept += half * model.num_attention_heads * (attended_tokens(config) // 2 + 32)
    total = 4 * parameters(model)
    trained = 4 * trained_parameters(model, train.frozen_layers)
    shards = train.shards(workers_per_node * nodes, workers_per_node)
    weights, gradients = total // shards, trained // shards
    one, two = (
        parameters(replace(model, num_hidden_layers=number, memory_layers=None))
        for number in (1, 2)
    )
    layer = 4 * (two - one)
    if shards > 1:
        root = total - layers * layer
        weights += root + layer * (layers if train.zero_stage == 2 else 2)
        gradients += max(layer, root)
    chunk = chunk_of(config, device, tokens)
    # At once the product, its fp32 copy and gradient; in parts the softmax is in place, and its copy in half precision comes after it.
    entry = half + 8 if not chunk else 4 if half == 4 else 6
    logits = min(tokens, chunk or tokens) * model.padded_vocab_size * entry
    activations = tokens * (layers_kept * kept + memories * kept_of_memory)
    if (
        train.activation_checkpointing != "none"
    ):  # a layer is computed again once the logits are freed
        activations = tokens * layers_kept * 4 * width + max(
            0, tokens * (kept + (kept_of_memory if memories else 0)) - logits
        )
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": moment_bytes(model, train) // shards,
        "activations": activations,
        "logits": logits,
        "batches": 2 * 8 * tokens,
    }


def bytes_of_plan(config: PipelineConfig, plan: EnvironmentPlan) -> dict[str, int]:
    """`bytes_needed` by the workers of a plan."""
    keeps_weights = plan.attention_backend == "blocked" and plan.keep_attention_weights
    workers, nodes = plan.nproc_per_node, plan.nnodes
    return bytes_needed(
        config, plan.micro_batch_size, plan.precision, plan.device, workers, nodes, keeps_weights
    )


def memory_per_worker(facts: MachineFacts, gpus: tuple[int, ...], workers: int) -> int:
    """Bytes that one worker may use: the free memory of the fullest GPU in use, or its part of the machine's."""
    if gpus:
        return min(facts.gpus[number].free for number in gpus)
    return facts.memory.available // workers


def fits(need: dict[str, int], have: int) -> bool:
    return sum(need.values()) + FIXED <= SHARE * have


def describe(need: dict[str, int], have: int) -> str:
    """'3.2 GiB (weights 0.3, gradients 0.3, …) of 24.0 GiB'."""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.items())
    return f"{sum(need.values()) / GIB:.1f} GiB ({parts}) of {have / GIB:.1f} GiB"


def check_disk_space(config: PipelineConfig, disk: Disk) -> Finding | None:
    """A finding if the checkpoints that are kept at a time do not fit.

    These are the newest, the best, those of train.save_permanent_every, and one more while it is written. The severity is error
    where not even one fits. None where they fit, or where the free space is unknown.
    """
    name, train = "disk space for checkpoints", config.train
    model = model_of(config)
    each = checkpoint_bytes(model, train)
    steps = train.planned_steps(config.data.sequence_length)
    permanent = steps // train.save_permanent_every if train.save_permanent_every else 0
    count = train.save_total_limit + 2 + permanent
    have = None if disk.free is None else disk.free + disk.run_bytes
    if have is None or count * each <= have:
        return None
    if have < each:
        sentence = f"Not one fits at {disk.path}; free space, or set runtime.home to a larger disk."
        value = f"{in_bytes(have)} are free, and one checkpoint takes {in_bytes(each)}"
        return finding(name, value, "error", sentence)
    value = f"{in_bytes(have)} are free for {count} checkpoints of {in_bytes(each)}"
    fix = "Saving will fail when the disk is full; free space, lower train.save_total_limit or set runtime.home to a larger disk."
    return finding(name, value, "warning", fix)
