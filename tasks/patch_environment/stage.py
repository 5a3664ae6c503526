"""The patch-environment stage: probe, resolve, pin. Nothing but the workers' own environment is ever changed."""

import errno
import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infini_llama.configs.architecture import of_vocabulary
from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.secrets import masked
from infini_llama.tasks.patch_environment.compare import KEPT, LOST, differences
from infini_llama.tasks.patch_environment.disk_space import ROOM
from infini_llama.tasks.patch_environment.findings import judge
from infini_llama.tasks.patch_environment.patches.registry import needed
from infini_llama.tasks.patch_environment.pin import BEFORE, EXACT, asking, complete, follow, to_pin
from infini_llama.tasks.patch_environment.plan import resolve
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.patch_environment.probe.node import of_node
from infini_llama.tasks.patch_environment.probe.probe import probe
from infini_llama.tasks.patch_environment.tuning.tune import tune

log = logging.getLogger("infini_llama.environment")
SAID = (
    "device",
    "nproc_per_node",
    "threads",
    "precision",
    "attention_backend",
    "compile",
    "allocator",
    "distributed_backend",
)


def patch_environment(
    config: dict, home: str, run: str, vocab_size: int | None = None, machine: Machine | None = None
) -> dict[str, Any]:
    """The plan of run `run`: the one pinned at its first attempt where there is one, else a new one.

    Nothing is written: under "record" the plan carries what `pin.write` puts into the run's environment.json once training has the run,
    so that a command which is refused leaves the pin of a living run alone.

    An explicit setting that differs from the pin is followed, and a machine that cannot follow the pin is not made to; both are
    said aloud, since the run is then no longer bitwise the one that began.

    Args:
        vocab_size: the dataset's; None: the configuration's.

    Raises:
        ConfigError: the configuration asks for what this machine has not, or `home` cannot be written.
        PipelineError: the disk is full, or has no room for a single checkpoint.
    """
    if vocab_size is not None:
        config = of_vocabulary(config, vocab_size)
    facts = probe(Path(home), config, machine)
    if config["environment"]["launcher"] != "local":
        facts = of_node(facts, config["environment"]["node"])
    path = Path(home) / "runs" / run / "environment.json"
    _refuse_bad_disk(facts["disk"], home)
    before = read_record(path)
    tuned = before["tuned"] if before and "tuned" in before else None
    if before:
        plan = follow(config, facts, before["pinned"])
    elif config["environment"]["tune"] == "off":
        plan = resolve(config, facts)
    else:
        tuned = tune(config, facts, Path(home))
        plan = resolve(asking(config, tuned["settings"]), facts)
        plan["reasons"] |= tuned["reasons"]
        where = "as found before" if tuned["cached"] else f"in {tuned['seconds']:.0f} s"
        log.info("tuned %s: %s", where, ", ".join(f"{k}={v}" for k, v in tuned["settings"].items()) or "nothing better")
    pinned = complete(before["pinned"], config, plan) if before else {}
    for one in differences(pinned, before["facts"], plan, facts) if before else []:
        say = log.info if one["exactness"] == KEPT else log.warning
        since = "in this run so far" if one["exactness"] == LOST else "at the last attempt"
        say("%s was %s %s and is %s now: %s.", one["name"], one["then"], since, one["now"], one["sentence"])
    for found in plan["findings"]:
        if found["name"] == ROOM and found["severity"] == "error":
            raise PipelineError(f"{found['value']}. {found['sentence']} Then run the same command again.")
    for found in [*judge(facts), *plan["findings"]]:
        if found["severity"] in ("warning", "error"):
            log.warning("%s: %s. %s", found["name"], found["value"], found["sentence"])
    record = {
        "pinned": to_pin(config, plan, pinned),
        "pinned_at": before["pinned_at"] if before else datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan | {"env": masked(plan["env"])},
        "patches": [patch.describe() for patch in needed(config, facts)],
        "tuned": tuned,
        "facts": facts,
    }
    log.info(
        "%s, %d worker(s) x %d thread(s), %s, %s, compile %s, allocator %s, %s",
        *(plan[name] for name in SAID),
    )
    return plan | {"record": record}


def _refuse_bad_disk(disk: dict, home: str) -> None:
    if disk["works"]:
        return
    if disk["fault"] in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)):
        raise PipelineError(f"no space at {disk['path']} ({disk['fault']}); free space and run the same command again.")
    raise ConfigError(
        f"runtime.home={home}: writing, syncing or renaming fails at {disk['path']} ({disk['fault']}); choose another folder."
    )


def read_record(path: Path) -> dict[str, Any] | None:
    """What an earlier attempt pinned, None where there was none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        named = set(EXACT) - set(BEFORE) - {"micro_batch_size", "loss_chunk"}
        if not named <= set(record["pinned"]) or not {"python", "cpu", "gpus", "versions"} <= set(record["facts"]):
            raise KeyError("settings or facts")
        return record
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s cannot be used (%s: %s) and is written anew: nothing proves that this attempt runs like the earlier ones.",
            path,
            type(error).__name__,
            error,
        )
        return None
