"""Whether the disk has room for the checkpoints that a run keeps."""

from pathlib import Path
from typing import Any

from infini_llama.configs.durations import planned_steps
from infini_llama.model.flops import parameters
from infini_llama.tasks.patch_environment.estimate import model_of
from infini_llama.tasks.patch_environment.finding import GIB, finding

ROOM = "room for checkpoints"
BYTES = 12  # a parameter: the weight and both moments of Adam, in fp32


def bytes_held(home: Path, config: dict) -> int:
    """What the run's checkpoints take already."""
    folder = home / "runs" / config["runtime"]["name"] / "checkpoints"
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def room_for_checkpoints(config: dict, disk: dict[str, Any]) -> dict[str, Any] | None:
    """A finding where the checkpoints that are kept at a time do not fit: the newest, the best, those kept for ever, and one more
    while it is written; an error where not even one does. None where they do, or where the disk does not tell."""
    train = config["train"]
    each = BYTES * parameters(model_of(config))
    steps = planned_steps(train, config["data"]["sequence_length"])
    for_ever = steps // train["save_permanent_every"] if train["save_permanent_every"] else 0
    count = train["save_total_limit"] + 2 + for_ever
    have = None if disk["free"] is None else disk["free"] + disk.get("held", 0)
    if have is None or count * each <= have:
        return None
    moments = {"adamw": 2, "adam": 2, "muon": 1, "sgd": 1 if train["momentum"] else 0}[train["optimizer"]]
    if have < each // 3 * (1 + moments):
        sentence = f"Not one checkpoint fits at {disk['path']}; free space, or set runtime.home to a larger disk."
        return finding(ROOM, f"{have / GIB:.2f} GiB, and one takes {each / GIB:.2f} GiB", "error", sentence)
    value = f"{have / GIB:.1f} GiB for {count} checkpoints of {each / GIB:.1f} GiB"
    cure = "Saving will fail when the disk is full; free space, lower train.save_total_limit or set runtime.home to a larger disk."
    return finding(ROOM, value, "warning", cure)
