"""The estimate of a run: what its configuration and this machine's plan come to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from infini_llama.configs.architecture import architecture, of_vocabulary
from infini_llama.configs.durations import planned_steps
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.ranks import groups_of, shards_of
from infini_llama.model.config import LlamaConfig
from infini_llama.model.flops import attention_flops, flops_per_token, matrix_parameters, parameters
from infini_llama.tasks.patch_environment.estimate import bytes_needed
from infini_llama.tasks.patch_environment.plan import resolve
from infini_llama.tasks.patch_environment.probe.probe import probe
from infini_llama.tasks.patch_environment.speed import loss_chunk
from infini_llama.tasks.preprocess.tokenizers import tokenizer as tokenizers
from infini_llama.tasks.train.initial import initial_weights

# What a worker on a CPU holds beside its tensors: interpreter and libraries, and of the tensors' size what glibc's allocator keeps free
# (0 to 0.3 in runs of 5 to 110 million parameters, docs/estimate.md).
PROCESS, HOLES = 480_000_000, 0.2


def estimate(config: dict) -> dict[str, Any]:
    """Parameters, FLOPs a token and bytes a worker of the run that `config` describes; nothing is built or trained.

    Returns:
        {"parameters": {"total", "embedding", "of_matrices"}, "flops_per_token": {"matrices", "attention", "memory", "total"}
        (forward and backward), "run": {"tokens", "flops", …}, "memory": {part: bytes of one worker}, "checkpoint": bytes on disk}.
        Parts of memory: those of `bytes_needed`; on a CPU also `checkpoint_copy` (of asynchronous saves), `process` and `holes`, so that
        the sum is the peak of the resident set; on a GPU the sum is the peak of what torch's allocator has given out.

    Raises:
        ConfigError: as the run itself would, but for a machine that is not this one.
    """
    data = config["data"]
    model = LlamaConfig.from_dict(fields_of(config))
    config = of_vocabulary(config, model.vocab_size)
    plan = plan_of(config)
    train = config["train"] | {"micro_batch_size": plan["micro_batch_size"]}
    workers, length = plan["nproc_per_node"] * plan["nnodes"], data["sequence_length"]
    groups = groups_of(train, workers)
    micro_batches, rest = divmod(train["global_batch_size"], train["micro_batch_size"] * groups)
    if rest:
        shared = "" if groups == workers else f" / {workers // groups} that share each sequence"
        raise ConfigError(
            f"train.global_batch_size={train['global_batch_size']} is not a multiple of train.micro_batch_size="
            f"{train['micro_batch_size']} x {workers} worker(s){shared}; change one of them."
        )
    place = plan["precision"], plan["device"], plan["nproc_per_node"], plan["nnodes"]
    memory = bytes_needed(config, train["micro_batch_size"], *place)
    state = 4 * 3 * parameters(model)  # fp32: weights and both moments
    if plan["device"] == "cpu":
        copy = state // workers if train["async_save"] else 0
        memory |= {"checkpoint_copy": copy, "process": PROCESS, "holes": int(HOLES * sum(memory.values()))}
    tokens, steps = train["global_batch_size"] * length, planned_steps(train, length)
    each = flops_of(model, length)
    return {
        "parameters": {
            "total": parameters(model),
            "embedding": model.vocab_size * model.hidden_size,
            "of_matrices": matrix_parameters(model),
        },
        "flops_per_token": each,
        "run": {
            "tokens_a_step": tokens,
            "tokens": tokens * steps,
            "flops": each["total"] * tokens * steps,
        },
        "layout": {
            "micro_batch_size": train["micro_batch_size"],
            "micro_batches": micro_batches,
            "workers": workers,
            "shards": shards_of(train, workers, plan["nproc_per_node"]),
            "precision": plan["precision"],
            "device": plan["device"],
            "loss_chunk": plan["loss_chunk"],
        },
        "memory": memory | {"total": sum(memory.values())},
        "checkpoint": state,
    }


def plan_of(config: dict) -> dict[str, Any]:
    """The plan on this machine, or the configuration at its word where that asks for a machine that this is not."""
    try:
        return resolve(config, probe(Path(config["runtime"]["home"])))
    except ConfigError:
        wishes = config["environment"]
        device = "cuda" if wishes["device"] == "cuda" else "cpu"
        workers = (
            wishes["nproc_per_node"]
            if isinstance(wishes["nproc_per_node"], int)
            else config["train"]["context_parallel"]
        )
        precision = wishes["precision"] if wishes["precision"] != "auto" else "bf16" if device == "cuda" else "fp32"
        micro = config["train"]["micro_batch_size"]
        micro = micro if isinstance(micro, int) else 1
        return {
            "device": device,
            "nproc_per_node": workers,
            "nnodes": wishes["nnodes"],
            "precision": precision,
            "micro_batch_size": micro,
            "loss_chunk": loss_chunk(
                config["train"]["loss_chunk"],
                device,
                micro * config["data"]["sequence_length"] // config["train"]["context_parallel"],
                config["data"]["tokenizer"]["vocab_size"],
            ),
        }


def fields_of(config: dict) -> dict[str, Any]:
    """The model's fields, with the vocabulary of a given tokenizer or of the weights to start from, or the whole one to be learned."""
    data = config["data"]
    vocabulary = data["tokenizer"]["vocab_size"]
    if tokenizers.is_given(data["tokenizer"]):
        vocabulary = tokenizers.load(data["tokenizer"]).get_vocab_size()
    if initial := initial_weights(config["train"]["init_from"]):
        vocabulary = initial.vocab_size
    return architecture(config["model"], vocabulary, data["sequence_length"])


def flops_of(model: LlamaConfig, length: int) -> dict[str, float]:
    """FLOPs a token, forward and backward: of the weights' matrices, of attention between tokens, of the compressive memory."""
    total = flops_per_token(model, length)
    local = replace(model, attention="local") if model.attention == "infini" else model
    attention = 3.0 * model.num_hidden_layers * attention_flops(local, length) / length
    matrices = 6.0 * matrix_parameters(model)
    return {"matrices": matrices, "attention": attention, "memory": total - matrices - attention, "total": total}
