"""How much memory a worker needs, before it is started, and the micro-batch that fits."""

from typing import Any

from infini_llama.configs.architecture import architecture
from infini_llama.configs.ranks import groups_of
from infini_llama.model.config import LlamaConfig
from infini_llama.model.flops import parameters
from infini_llama.tasks.patch_environment.speed import loss_chunk

GIB = 1024**3
# Of what is free, for what no estimate sees: fragments, kernels' workspaces, Python and its libraries.
SHARE, FIXED = 0.8, 1 * GIB
# More tokens in one forward pass make a CPU no faster (its caches are full), and a GPU only up to some tens of thousands.
ENOUGH_TOKENS = {"cpu": 8192, "cuda": 65536}


def model_of(config: dict) -> LlamaConfig:
    """The run's model, with the vocabulary that the configuration asks for."""
    data = config["data"]
    return LlamaConfig.from_dict(
        architecture(config["model"], data["tokenizer"]["vocab_size"], data["sequence_length"])
    )


def bytes_needed(config: dict, micro: int, precision: str, kind: str, workers: int) -> dict[str, int]:
    """{"state", "activations", "logits"} in bytes of one worker.

    State is 16 bytes a parameter: weights, gradients and Adam's two moments in fp32 (Rajbhandari et al. 2020, section 3.1), split over
    the workers under fsdp. Activations are what a layer keeps for
    its backward pass, a token: its two inputs and norms in fp32, queries, keys, values and the products inside the MLP in the type
    computed in (after Korthikanti et al. 2022, eq. 1, without the scores, which no backend keeps).
    """
    model, train = model_of(config), config["train"]
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    half = 4 if precision == "fp32" else 2
    tokens = micro * config["data"]["sequence_length"] // train["context_parallel"]
    kept = 4 * 4 * width + half * (8 * width + 4 * inner)
    if train["activation_checkpointing"] != "none":
        kept = 4 * width + kept // layers
    split = workers if train["parallel"] == "fsdp" else 1  # of hsdp the shards may be as few as one
    chunk = loss_chunk(train["loss_chunk"], kind, tokens, model.vocab_size)
    return {
        "state": 16 * parameters(model) // split,
        "activations": tokens * layers * kept,
        "logits": min(tokens, chunk or tokens) * model.vocab_size * (half + 8),
    }


def memory_of_each(facts: dict, gpus: list[int], workers: int) -> int:
    """Bytes that one worker may use: the free memory of the fullest GPU in use, or its part of the machine's."""
    if gpus:
        return min(facts["gpus"][number]["free"] for number in gpus)
    return facts["memory"]["available"] // workers


def fits(need: dict[str, int], have: int) -> bool:
    return sum(need.values()) + FIXED <= SHARE * have


def micro_batch(config: dict, facts: dict, precision: str, kind: str, gpus: list[int], workers: int) -> int:
    """The most sequences of one forward pass that fit and still help; at least 1, and a divisor of a worker's share."""
    nodes = config["environment"]["nnodes"]
    share = max(1, config["train"]["global_batch_size"] // groups_of(config["train"], workers * nodes))
    length = config["data"]["sequence_length"] // config["train"]["context_parallel"]
    have = memory_of_each(facts, gpus, workers)
    fitting = [
        size
        for size in range(1, share + 1)
        if share % size == 0
        and (size == 1 or size * length <= ENOUGH_TOKENS[kind])
        and fits(bytes_needed(config, size, precision, kind, workers * nodes), have)
    ]
    return max(fitting, default=1)


def describe(need: dict[str, Any], have: int) -> str:
    """'3.2 GiB (state 1.0, activations 1.8, logits 0.4) of 24.0 GiB'."""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.items())
    return f"{sum(need.values()) / GIB:.1f} GiB ({parts}) of {have / GIB:.1f} GiB"
