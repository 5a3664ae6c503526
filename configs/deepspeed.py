"""DeepSpeed's JSON beside the run's own keys: what both say must agree, and only what DeepSpeed alone decides is taken from it."""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import TrainingConfig

# What changes how ZeRO communicates and where it keeps things, but not what is computed (https://www.deepspeed.ai/docs/config-json).
TAKEN: dict[str, set[str] | None] = {
    "zero_optimization": {
        "stage",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "reduce_scatter",
        "reduce_bucket_size",
        "contiguous_gradients",
        "round_robin_gradients",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_gather_16bit_weights_on_model_save",
    },
    "prescale_gradients": None,
    "gradient_predivide_factor": None,
    "communication_data_type": None,
    "comms_logger": None,
    "steps_per_print": None,
    "wall_clock_breakdown": None,
    "memory_breakdown": None,
}
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}
KEY = "train.deepspeed_config"


def read_json(given: str | JsonObject | None) -> JsonObject:
    """The contents of train.deepspeed_config: a file's path, or already the contents; {} where it is not given.

    Raises:
        ConfigError: no such file, or no JSON object.
    """
    if not isinstance(given, str):
        return given or {}
    try:
        found: JsonValue = json.loads(Path(given).read_bytes())
    except OSError as error:
        raise ConfigError(f"{KEY}={given} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}={given} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{KEY}={given} does not contain a JSON object.")
    return found


def refuse_contradictions(train: TrainingConfig, micro_batch_size: int, precision: str, workers: int) -> None:
    """Compare train.deepspeed_config with the run's own keys.

    Args:
        micro_batch_size: sequences, as planned.
        precision: the plan's: fp32, bf16 or fp16.

    Raises:
        ConfigError: what contradicts them or is unknown, one line per problem.
    """
    given = _without_auto(read_json(train.deepspeed_config))
    if problems := list(_problems(given, train, _sizes(train, micro_batch_size, workers), precision)):
        raise ConfigError(f"{KEY} does not fit the run", [f"{KEY}: {problem}" for problem in problems])


def engine_settings(train: TrainingConfig, micro_batch_size: int, workers: int) -> JsonObject:
    """What DeepSpeed's engine is given: the run's own keys, and from train.deepspeed_config what they leave open.

    Args:
        micro_batch_size: sequences, as in force: after an out-of-memory error fewer than train.deepspeed_config may say.
    """
    given = _without_auto(read_json(train.deepspeed_config))
    zero: JsonObject = {"stage": train.zero_stage or 2}
    if isinstance(own := given.get("zero_optimization"), dict):
        zero |= own
    taken = {name: value for name, value in given.items() if name in TAKEN}
    sizes = _sizes(train, micro_batch_size, workers)
    return {**taken, **sizes, "gradient_clipping": train.max_grad_norm, "zero_optimization": zero}


def _sizes(train: TrainingConfig, micro_batch_size: int, workers: int) -> dict[str, int]:
    accumulation = train.global_batch_size // (micro_batch_size * workers)
    return {"train_micro_batch_size_per_gpu": micro_batch_size, "gradient_accumulation_steps": accumulation}


def _problems(given: JsonObject, train: TrainingConfig, sizes: dict[str, int], precision: str) -> Iterator[str]:
    micro, accumulation = sizes.values()
    own = {
        "train_batch_size": ("train.global_batch_size", train.global_batch_size),
        "train_micro_batch_size_per_gpu": ("train.micro_batch_size", micro),
        "gradient_accumulation_steps": ("global batch / (micro-batch x workers)", accumulation),
        "gradient_clipping": ("train.max_grad_norm", train.max_grad_norm),
    }
    for name, value in given.items():
        if name in own:
            yield from _disagreement(name, value, *own[name])
        elif name in ("fp16", "bf16"):
            yield from _precision(name, value, precision)
        elif name == "optimizer":
            yield from _optimizer(value, train)
        elif name == "scheduler":
            yield "scheduler: the learning rate follows train.lr_schedule; take it out."
        elif name not in TAKEN:
            yield f"{name} is not known here; take it out, or say it by a key of the run (docs/configuration.md)."
        elif (known := TAKEN[name]) is not None:
            if not isinstance(value, dict):
                yield f"{name}={value!r} is no JSON object."
                continue
            yield from (f"{name}.{key} is not known here; take it out." for key in value if key not in known)
    zero = given.get("zero_optimization")
    if isinstance(zero, dict) and "stage" in zero:
        stage = zero["stage"]
        if isinstance(stage, bool) or stage not in (1, 2, 3):
            yield f"zero_optimization.stage={stage!r} is not 1, 2 or 3; without ZeRO use train.parallel=ddp."
        elif train.zero_stage is not None:
            yield from _disagreement("zero_optimization.stage", stage, "train.zero_stage", train.zero_stage)


def _precision(name: str, value: JsonValue, precision: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{name}={value!r} is no JSON object."
        return
    enabled = value.get("enabled", precision == name)
    if not isinstance(enabled, bool) or enabled != (precision == name):
        yield f"{name}.enabled={enabled!r}, but the run computes in {precision}; set environment.precision, or take it out."
    for key in value.keys() - {"enabled"}:
        yield f"{name}.{key}: weights stay in fp32 and fp16's scale is the run's own; take it out."


def _optimizer(value: JsonValue, train: TrainingConfig) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"optimizer={value!r} is no JSON object."
        return
    if "type" in value and OPTIMIZERS.get(str(value["type"])) != train.optimizer:
        yield (
            f"optimizer.type={value['type']!r}, but train.optimizer={train.optimizer} (AdamW is adamw, Adam is adam); change one."
        )
    for name in value.keys() - {"type", "params"}:
        yield f"optimizer.{name} is not known here; take it out."
    params = value.get("params", {})
    if not isinstance(params, dict):
        yield f"optimizer.params={params!r} is no JSON object."
        return
    own = {
        "lr": ("train.learning_rate", train.learning_rate),
        "betas": ("train.adam_beta1 and adam_beta2", [train.adam_beta1, train.adam_beta2]),
        "eps": ("train.adam_epsilon", train.adam_epsilon),
        "weight_decay": ("train.weight_decay", train.weight_decay),
    }
    for name, found in params.items():
        if name in own:
            yield from _disagreement(f"optimizer.params.{name}", found, *own[name])
        else:
            yield f"optimizer.params.{name} is not known here; take it out."


def _disagreement(name: str, value: JsonValue, key: str, own: object) -> Iterator[str]:
    if isinstance(value, bool) or value != own:
        yield f'{name}={value!r}, but {key} is {own!r}; change one, or write "auto".'


def _without_auto(given: JsonObject) -> JsonObject:
    """Without what is left to the run."""
    stated = {name: value for name, value in given.items() if value != "auto"}
    return {name: _without_auto(value) if isinstance(value, dict) else value for name, value in stated.items()}
