"""DeepSpeed's JSON beside the run's own keys.

Values in both must agree, and only settings that no key of the run has are taken from the JSON.
"""

import json

from pydantic import JsonValue

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.optimizers import OPTIMIZERS
from infini_llama.configs.pointers import refuse_pointer
from infini_llama.configs.reading import JsonObject, dotted, expanded
from infini_llama.configs.schema import TrainingConfig

# Settings of how ZeRO communicates and where it keeps things, which do not change what is computed
# (https://www.deepspeed.ai/docs/config-json).
TAKEN = {
    "zero_optimization.stage",
    "zero_optimization.allgather_partitions",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_scatter",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "prescale_gradients",
    "gradient_predivide_factor",
    "communication_data_type",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
}
KEY = "train.deepspeed_config"


def read_json(source: str | JsonObject | None) -> JsonObject:
    """Read the contents of train.deepspeed_config.

    Args:
        source: a file's path, or already the contents; None where the key is not set.

    Returns:
        the contents; {} where the key is not set.

    Raises:
        ConfigError: no such file, or no JSON object.
    """
    if not isinstance(source, str):
        return source or {}
    file = expanded(source)
    refuse_pointer(file)
    try:
        content: JsonValue = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{KEY}={source} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}={source} is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{KEY}={source} does not contain a JSON object.")
    return content


def refuse_contradictions(
    train: TrainingConfig, micro_batch_size: int, precision: str, workers: int
) -> None:
    """Compare train.deepspeed_config with the run's own keys.

    Args:
        micro_batch_size: sequences, as planned.
        precision: the plan's: fp32, bf16 or fp16.

    Raises:
        ConfigError: what contradicts them or is unknown, one line per problem.
    """
    of_run = _values_of_run(train, micro_batch_size, precision, workers)
    problems: list[str] = []
    for name, value in _stated(train).items():
        key, expected = of_run.get(name, ("", value))
        # In Python, True equals 1; in JSON, true is no number.
        is_one_a_flag = (type(value) is bool) != (type(expected) is bool)
        if is_one_a_flag or value != expected:
            problems.append(
                f'{name}={value!r}, but {key} is {expected!r}; change one, or write "auto".'
            )
        elif name == "zero_optimization.stage" and (
            type(value) is bool or value not in (1, 2, 3)
        ):
            problems.append(
                f"{name}={value!r} is not 1, 2 or 3; without ZeRO use train.parallel=ddp."
            )
        elif name not in TAKEN and name not in of_run:
            problems.append(
                f"{name} is not known here; take it out, or use a key of the run "
                "(docs/configuration.md)."
            )
    if problems:
        raise ConfigError(
            f"{KEY} does not fit the run", [f"{KEY}: {problem}" for problem in problems]
        )


def _values_of_run(
    train: TrainingConfig, micro_batch_size: int, precision: str, workers: int
) -> dict[str, tuple[str, JsonValue]]:
    """By DeepSpeed's keys: the run's own key, and its value."""
    sizes = _sizes(train, micro_batch_size, workers)
    of_run: dict[str, tuple[str, JsonValue]] = {
        "train_batch_size": ("train.global_batch_size", train.global_batch_size),
        "train_micro_batch_size_per_gpu": ("train.micro_batch_size", micro_batch_size),
        "gradient_accumulation_steps": (
            "global batch / (micro-batch x workers)",
            sizes["gradient_accumulation_steps"],
        ),
        "gradient_clipping": ("train.max_grad_norm", train.max_grad_norm),
        "fp16.enabled": ("environment.precision=fp16", precision == "fp16"),
        "bf16.enabled": ("environment.precision=bf16", precision == "bf16"),
        "optimizer.type": (
            f"train.optimizer={train.optimizer}",
            OPTIMIZERS[train.optimizer].deepspeed,
        ),
        "optimizer.params.lr": ("train.learning_rate", train.learning_rate),
        "optimizer.params.betas": (
            "train.adam_beta1 and adam_beta2",
            [train.adam_beta1, train.adam_beta2],
        ),
        "optimizer.params.eps": ("train.adam_epsilon", train.adam_epsilon),
        "optimizer.params.weight_decay": ("train.weight_decay", train.weight_decay),
    }
    if train.zero_stage is not None:
        of_run["zero_optimization.stage"] = ("train.zero_stage", train.zero_stage)
    return of_run


def engine_settings(
    train: TrainingConfig, micro_batch_size: int, workers: int
) -> JsonObject:
    """Settings of DeepSpeed's engine.

    They are the run's own keys, and from train.deepspeed_config what these leave open.

    Args:
        micro_batch_size: sequences, as in force: after an out-of-memory error fewer than
            train.deepspeed_config may say.
    """
    zero: JsonObject = {"stage": train.zero_stage or 2}
    settings: JsonObject = {
        **_sizes(train, micro_batch_size, workers),
        "gradient_clipping": train.max_grad_norm,
    }
    for name, value in _stated(train).items():
        section, _, key = name.rpartition(".")
        if name in TAKEN:
            target = zero if section else settings
            target[key] = value
    return {**settings, "zero_optimization": zero}


def _sizes(
    train: TrainingConfig, micro_batch_size: int, workers: int
) -> dict[str, int]:
    accumulation = train.global_batch_size // (micro_batch_size * workers)
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
    }


def _stated(train: TrainingConfig) -> JsonObject:
    """Dotted keys of train.deepspeed_config without those that are left to the run."""
    contents = dotted(read_json(train.deepspeed_config))
    return {name: value for name, value in contents.items() if value != "auto"}
