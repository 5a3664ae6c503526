"""The estimate of a run from its configuration and this machine's plan."""

from dataclasses import replace

from infini_llama.configs.errors import ConfigError, one_line
from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import (
    FrozenLayers,
    LlamaConfig,
    attention_flops_per_token,
    first_trained_layer,
    flops_per_token,
    matrix_flops_per_token,
    matrix_parameters,
    parameters,
)
from infini_llama.tasks.patch_environment.footprint import (
    bytes_of_plan,
    checkpoint_bytes,
    chunk_of,
    model_of,
)
from infini_llama.tasks.patch_environment.plan import (
    plan_environment,
    usual_micro_batch,
)
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.records.estimate import (
    Estimate,
    FlopsPerToken,
    Layout,
    ParameterCount,
    RunSize,
)
from infini_llama.tasks.records.plan import EnvironmentPlan, PinnedSettings, finding
from infini_llama.tasks.tokenizers import tokenizer as tokenizers
from infini_llama.tasks.train.initial import initial_weights

# What a worker on a CPU holds beside its tensors: interpreter and libraries, in bytes, and the
# fraction of the tensors' size that glibc's allocator keeps free (0 to 0.3 in runs of 5 to 110
# million parameters, docs/estimate.md).
PROCESS = 480_000_000
HOLES = 0.2


def estimate(
    config: PipelineConfig, pinned: PinnedSettings | None = None
) -> tuple[EnvironmentPlan, Estimate]:
    """The plan of the run that `config` describes, and its estimate.

    The estimate has parameters, FLOPs per token and bytes per worker. Nothing is built or trained.

    Args:
        pinned: of the run's first attempt, None before it.

    Raises:
        ConfigError: as the run itself would, except for a machine that is not this one.
    """
    config = config.with_vocab_size(vocabulary_of(config))
    length = config.data.sequence_length
    train = config.train
    model = model_of(config)
    plan = plan_of(config, pinned)
    sequences = train.global_batch_size
    micro = plan.micro_batch_size
    memory = worker_memory(config, plan)
    is_known = train.num_epochs is None and (
        train.max_tokens is None or config.data.has_only_targets
    )
    tokens = train.planned_tokens(length) if is_known else None
    per_token = flops_of(model, length, train.frozen_layers)
    return plan, Estimate(
        parameters=ParameterCount(
            total=parameters(model),
            embedding=model.padded_vocab_size * model.hidden_size,
            of_matrices=matrix_parameters(model),
        ),
        flops_per_token=per_token,
        run=RunSize(
            tokens_per_step=sequences * length,
            tokens=tokens,
            flops=None if tokens is None else per_token.total * tokens,
        ),
        layout=Layout(
            micro_batch_size=micro,
            micro_batches=sequences // (micro * train.groups(plan.world_size)),
            workers=plan.world_size,
            shards=train.shards(plan.world_size, plan.nproc_per_node),
            precision=plan.precision,
            device=plan.device,
            loss_chunk=plan.loss_chunk,
        ),
        memory=memory | {"total": sum(memory.values())},
        checkpoint=checkpoint_bytes(model, train),
    )


def worker_memory(config: PipelineConfig, plan: EnvironmentPlan) -> dict[str, int]:
    """Bytes that a worker needs on its device, by what they are for."""
    memory = bytes_of_plan(config, plan)
    if plan.device == "cpu":
        state = checkpoint_bytes(model_of(config), config.train)
        copy = state // plan.world_size if config.train.async_save else 0
        memory |= {
            "checkpoint_copy": copy,
            "process": PROCESS,
            "holes": int(HOLES * sum(memory.values())),
        }
    return memory


def plan_of(config: PipelineConfig, pinned: PinnedSettings | None) -> EnvironmentPlan:
    """The plan on this machine.

    Where this machine cannot run the configuration, it is a plan of what the configuration sets,
    with the reason as a finding.
    """
    try:
        return plan_environment(config, probe(config.runtime.home), pinned)
    except ConfigError as refusal:
        settings = config.environment
        train = config.train
        device = "cuda" if settings.device == "cuda" else "cpu"
        default = "bf16" if device == "cuda" else "fp32"
        processes = (
            train.context_parallel
            if settings.nproc_per_node == "auto"
            else settings.nproc_per_node
        )
        groups = train.groups(processes * settings.nnodes)
        micro = train.micro_batch_size
        if not isinstance(micro, int):  # auto depends on the memory of that machine
            micro = usual_micro_batch(max(1, train.global_batch_size // groups))
        return EnvironmentPlan(
            device=device,
            gpus=(),
            nproc_per_node=processes,
            nnodes=settings.nnodes,
            precision=default if settings.precision == "auto" else settings.precision,
            attention_backend=settings.attention_backend,
            loss_chunk=chunk_of(
                config,
                device,
                micro * config.data.sequence_length // train.context_parallel,
            ),
            threads=1,
            distributed_backend=settings.distributed_backend,
            micro_batch_size=micro,
            findings=(
                finding(
                    "this machine",
                    "cannot run the configuration",
                    "warning",
                    one_line(refusal),
                ),
            ),
        )


def vocabulary_of(config: PipelineConfig) -> int:
    """The vocabulary size of the weights to start from, or of the tokenizer.

    A tokenizer that is to be learned has the whole size that its configuration names.
    """
    if initial := initial_weights(config.train.init_from):
        return initial.vocab_size
    tokenizer = config.data.tokenizer
    if tokenizers.is_given(tokenizer):
        return tokenizers.load(tokenizer).get_vocab_size()
    return tokenizer.vocab_size


def flops_of(model: LlamaConfig, length: int, frozen: FrozenLayers) -> FlopsPerToken:
    """FLOPs per token of sequences of `length` tokens."""
    total = flops_per_token(model, length, frozen)
    local = replace(model, attention="local") if model.attention == "infini" else model
    matrices = matrix_flops_per_token(model, frozen)
    attention = attention_flops_per_token(
        local, length, first_trained_layer(model, frozen)
    )
    return FlopsPerToken(
        matrices=matrices,
        attention=attention,
        memory=total - matrices - attention,
        total=total,
    )
