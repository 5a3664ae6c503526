"""The strategies that `train.parallel` names, without torch.

Each is a class in tasks/train/worker/strategies with the methods of `Strategy` there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from infini_llama.configs.choices import Choice
from infini_llama.configs.optimizers import OPTIMIZERS

FOLDER = "infini_llama.tasks.train.worker.strategies"


@dataclass(frozen=True)
class Parallel(Choice):
    """A value of `train.parallel`.

    Attributes:
        maker: the class, as "module:name".
        zero_stages: the values of train.zero_stage that it has; none: it shards nothing.
        shards: workers that share one copy of the model, of all workers and train.shard_size.
    """

    maker: str
    zero_stages: tuple[int, ...] = ()
    shards: Callable[[int, int], int] = lambda workers, shard_size: 1


STRATEGIES = {
    "ddp": Parallel(
        description="the model is replicated on every worker.",
        maker=f"{FOLDER}.native:DDP",
    ),
    "fsdp": Parallel(
        description="parameters, gradients and optimizer state are sharded over all workers "
        "(FSDP2).",
        maker=f"{FOLDER}.native:FSDP",
        zero_stages=(2, 3),
        shards=lambda workers, shard_size: workers,
    ),
    "hsdp": Parallel(
        description="sharded in groups of train.shard_size workers and replicated between groups.",
        maker=f"{FOLDER}.native:FSDP",
        zero_stages=(2, 3),
        shards=lambda workers, shard_size: shard_size,
    ),
    # Its workers count as one shard each: what every stage fits into.
    "deepspeed": Parallel(
        description="sharded by DeepSpeed's ZeRO (extra `deepspeed`).",
        maker=f"{FOLDER}.deepspeed:DeepSpeed",
        zero_stages=(1, 2, 3),
    ),
}


def fits(optimizer: str, parallel: str) -> bool:
    """Whether an optimizer works with a strategy."""
    entry = OPTIMIZERS[optimizer]
    if parallel == "deepspeed":
        return entry.deepspeed != ""
    return entry.matrices is None or not STRATEGIES[parallel].zero_stages


def fault_of_compile(compile: str, parallel: str) -> str:
    """Why a value of train.compile does not work with a strategy; "" if it does."""
    if compile in ("block", "whole") and parallel == "deepspeed":
        return (
            f"compile={compile} cannot be combined with parallel=deepspeed; use "
            "compile=off, or parallel=fsdp"
        )
    if compile == "whole" and STRATEGIES[parallel].zero_stages:
        return (
            f"compile=whole cannot be combined with parallel={parallel}, which gathers "
            "parameters layer by layer; use compile=block"
        )
    return ""
