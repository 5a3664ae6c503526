"""Whether the checkpoints that a run keeps fit on the disk."""

from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.flops import parameters
from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.patch_environment.planning.estimate import model_of
from infini_llama.tasks.records.machine import Disk
from infini_llama.tasks.records.plan import Finding, finding

CHECKPOINT_SPACE = "disk space for checkpoints"
BYTES = 12  # per parameter: the weight and both moments of Adam, in fp32


def check_disk_space(config: PipelineConfig, disk: Disk) -> Finding | None:
    """A finding if the checkpoints that are kept at a time do not fit.

    These are the newest, the best, those of train.save_permanent_every, and one more while it is written. The severity is error
    where not even one fits. None where they fit, or where the free space is unknown.
    """
    train = config.train
    each = BYTES * parameters(model_of(config))
    steps = train.planned_steps(config.data.sequence_length)
    permanent = steps // train.save_permanent_every if train.save_permanent_every else 0
    count = train.save_total_limit + 2 + permanent
    have = None if disk.free is None else disk.free + disk.run_bytes
    if have is None or count * each <= have:
        return None
    moments = {"adamw": 2, "adam": 2, "muon": 1, "sgd": 1 if train.momentum else 0}[train.optimizer]
    if have < each // 3 * (1 + moments):
        sentence = f"Not one checkpoint fits at {disk.path}; free space, or set runtime.home to a larger disk."
        value = f"{in_bytes(have)}, and one takes {in_bytes(each)}"
        return finding(CHECKPOINT_SPACE, value, "error", sentence)
    value = f"{in_bytes(have)} for {count} checkpoints of {in_bytes(each)}"
    fix = "Saving will fail when the disk is full; free space, lower train.save_total_limit or set runtime.home to a larger disk."
    return finding(CHECKPOINT_SPACE, value, "warning", fix)
