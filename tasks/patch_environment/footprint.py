"""Needs of a run, before it is started: memory of a worker, and disk space for checkpoints."""

from dataclasses import replace

from infini_llama.configs.optimizers import OPTIMIZERS
from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.model.config import (
    LlamaConfig,
    first_trained_layer,
    memory_activation_bytes,
    parameters,
    trained_layer_matrices,
    trained_parameters,
)
from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.records.machine import Disk, MachineFacts
from infini_llama.tasks.records.plan import (
    Device,
    EnvironmentPlan,
    Finding,
    Precision,
    finding,
)

GIB = 1024**3
# A worker uses at most this share of what is free, after these bytes: the rest is for what no
# estimate sees (fragments, kernels' workspaces, Python and its libraries).
SHARE = 0.8
FIXED = 1 * GIB
# Bytes of fp32 logits of one micro-batch from which they are computed in parts.
LARGE_LOGITS = {"cpu": 32 * 2**20, "cuda": 2**30}
# On a CPU a part is the largest power of two of tokens whose logits take so many bytes: the head's
# weights and gradient are read for each part, so that smaller parts are slower, even such as a
# cache holds (benchmarks/loss.py).
CPU_CHUNK_BYTES = 128 * 2**20
# On a GPU a part has so many tokens.
GPU_CHUNK = 4096


def moment_bytes(model: LlamaConfig, train: TrainingConfig) -> int:
    """Bytes of the optimizer's moments, of the weights that are trained."""
    optimizer = OPTIMIZERS[train.optimizer]
    matrices = trained_layer_matrices(model, train.frozen_layers)
    others = trained_parameters(model, train.frozen_layers) - matrices
    of_matrices = optimizer.matrices or optimizer.update
    return 4 * (
        len(of_matrices.moments) * matrices + len(optimizer.update.moments) * others
    )


def checkpoint_bytes(model: LlamaConfig, train: TrainingConfig) -> int:
    """Bytes of a checkpoint: weights in fp32, and the optimizer's moments."""
    return 4 * parameters(model) + moment_bytes(model, train)


def model_of(config: PipelineConfig) -> LlamaConfig:
    """The run's model, with the vocabulary size of the configuration."""
    data = config.data
    return LlamaConfig(
        **config.model.architecture(data.tokenizer.vocab_size, data.sequence_length)
    )


def chunk_of(config: PipelineConfig, device: Device, tokens: int) -> int:
    """Tokens of a micro-batch whose logits exist at a time; 0: all.

    That is `train.loss_chunk`, and for auto it follows a rule.

    Args:
        tokens: of the micro-batch.
    """
    if config.train.loss_chunk != "auto":
        return config.train.loss_chunk
    vocab_size = config.data.tokenizer.vocab_size
    if 4 * tokens * vocab_size <= LARGE_LOGITS[device]:
        return 0
    if device == "cuda":
        return GPU_CHUNK
    most_tokens = CPU_CHUNK_BYTES // (4 * vocab_size)
    return 1 << (most_tokens.bit_length() - 1)


def bytes_needed(
    config: PipelineConfig,
    micro: int,
    precision: Precision,
    device: Device,
    workers_per_node: int,
    nodes: int = 1,
    keeps_attention_weights: bool = False,
) -> dict[str, int]:
    """Bytes of memory that one worker needs, by their purpose.

    Weights, gradients and the optimizer's moments are fp32: with Adam 16 bytes per parameter
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1). Layers below the first trained one
    have weights alone.

    Args:
        micro: sequences per forward pass.

    Returns:
        {"weights", "gradients", "optimizer", "activations", "logits", "batches"}.
    """
    model = model_of(config)
    train = config.train
    number_bytes = 4 if precision == "fp32" else 2
    tokens = micro * config.data.sequence_length // train.context_parallel
    shards = train.shards(workers_per_node * nodes, workers_per_node)
    weights, gradients = _weight_and_gradient_bytes(model, train, shards)
    logits = _logit_bytes(model, chunk_of(config, device, tokens), tokens, number_bytes)
    seen = None
    if keeps_attention_weights:
        length = config.data.sequence_length
        seen = int(model.attended_pairs(length) / length)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": moment_bytes(model, train) // shards,
        "activations": _activation_bytes(
            model, train, tokens, number_bytes, seen, logits
        ),
        "logits": logits,
        "batches": 2 * 8 * tokens,
    }


def _weight_and_gradient_bytes(
    model: LlamaConfig, train: TrainingConfig, shards: int
) -> tuple[int, int]:
    """Bytes of fp32 weights, and of their gradients, of a worker that has one of `shards` parts.

    Under fsdp and hsdp a worker has its share of each, what is gathered of the weights at a time
    (embedding, head and final norm, and two layers, or all where they are kept after the forward
    pass), and the largest gradient before it is split.
    """
    total = 4 * parameters(model)
    trained = 4 * trained_parameters(model, train.frozen_layers)
    weights = total // shards
    gradients = trained // shards
    if shards == 1:
        return weights, gradients
    of_one_layer = parameters(replace(model, num_hidden_layers=1, memory_layers=None))
    of_two_layers = parameters(replace(model, num_hidden_layers=2, memory_layers=None))
    layer = 4 * (of_two_layers - of_one_layer)
    root = total - model.num_hidden_layers * layer
    gathered_layers = model.num_hidden_layers if train.zero_stage == 2 else 2
    weights += root + layer * gathered_layers
    gradients += max(layer, root)
    return weights, gradients


def _logit_bytes(
    model: LlamaConfig,
    chunk: int,
    tokens: int,
    number_bytes: int,
) -> int:
    """Bytes of the logits that exist at a time.

    Args:
        chunk: of `chunk_of`.
        number_bytes: of a number in the type computed in.
    """
    if not chunk:
        # The product, its fp32 copy and its gradient exist at once.
        return tokens * model.padded_vocab_size * (number_bytes + 8)
    # The softmax is in place, and its copy in half precision comes after it.
    entry_bytes = 4 if number_bytes == 4 else 6
    return min(tokens, chunk) * model.padded_vocab_size * entry_bytes


def _activation_bytes(
    model: LlamaConfig,
    train: TrainingConfig,
    tokens: int,
    number_bytes: int,
    seen: int | None,
    logits: int,
) -> int:
    """Bytes of the activations that a worker keeps for the backward pass.

    A layer keeps per token its two inputs and norms in fp32, and queries, keys, values and the
    products inside the MLP in the type computed in (after Korthikanti et al. 2022, arXiv
    2205.05198, eq. 1). Layers below the first trained one keep none.

    Args:
        tokens: of a micro-batch.
        number_bytes: of a number in the type computed in.
        seen: tokens that a token attends to on average, where softmax weights are kept; None: they
            are not.
        logits: bytes, which are freed before a layer is computed again.
    """
    width = model.hidden_size
    q_width = model.num_attention_heads * model.head_size
    in_fp32 = 4 * 4 * width
    kept = in_fp32 + number_bytes * (
        4 * width + 4 * q_width + 4 * model.intermediate_size
    )
    if seen is not None:
        # Weights of the pairs, and of half a block of queries.
        kept += number_bytes * model.num_attention_heads * (seen + 32)
    if model.sees_previous_segment:
        # Keys and values once more, for the segments that see them.
        kv_width = model.num_key_value_heads * model.head_size
        kept += number_bytes * 2 * kv_width
    kept_of_memory = memory_activation_bytes(model, number_bytes)
    # The backward pass is computed from this layer on, also where a layer's own weights are frozen.
    first = first_trained_layer(model, train.frozen_layers)
    layers = model.num_hidden_layers - first
    memories = sum(layer >= first for layer in model.layers_with_memory)
    if train.activation_checkpointing == "none":
        return tokens * (layers * kept + memories * kept_of_memory)
    # One layer is computed again at a time, once the logits are freed.
    of_one_layer = tokens * (kept + kept_of_memory) if memories else tokens * kept
    return tokens * layers * 4 * width + max(0, of_one_layer - logits)


def bytes_of_plan(config: PipelineConfig, plan: EnvironmentPlan) -> dict[str, int]:
    """`bytes_needed` by the workers of a plan."""
    keeps_weights = plan.attention_backend == "blocked" and plan.keep_attention_weights
    return bytes_needed(
        config,
        plan.micro_batch_size,
        plan.precision,
        plan.device,
        plan.nproc_per_node,
        plan.nnodes,
        keeps_weights,
    )


def memory_per_worker(facts: MachineFacts, gpus: tuple[int, ...], workers: int) -> int:
    """Bytes that one worker may use.

    The free memory of the fullest GPU in use, or the worker's part of the machine's.
    """
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

    These are the newest, the best, those of train.save_permanent_every, and one more while it is
    written. The severity is error where not even one fits. None where they fit, or where the free
    space is unknown.
    """
    name = "disk space for checkpoints"
    train = config.train
    model = model_of(config)
    each = checkpoint_bytes(model, train)
    steps = train.planned_steps(config.data.sequence_length)
    permanent = steps // train.save_permanent_every if train.save_permanent_every else 0
    count = train.save_total_limit + 2 + permanent
    have = None if disk.free is None else disk.free + disk.run_bytes
    if have is None or count * each <= have:
        return None
    if have < each:
        sentence = (
            f"Not one fits below {disk.path}; "
            "free space, or set runtime.home to a larger disk."
        )
        value = f"{in_bytes(have)} are free, and one checkpoint takes {in_bytes(each)}"
        return finding(name, value, "error", sentence)
    value = f"{in_bytes(have)} are free for {count} checkpoints of {in_bytes(each)}"
    fix = (
        "Saving will fail when the disk is full; free space, lower train.save_total_limit "
        "or set runtime.home to a larger disk."
    )
    return finding(name, value, "warning", fix)
