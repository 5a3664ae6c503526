"""The patch-environment stage: probe, resolve, pin. Only the workers' own environment is changed."""

import errno
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.patches.patch import Patch
from infini_llama.tasks.patch_environment.patches.registry import PATCHES
from infini_llama.tasks.patch_environment.planning.compare import differences
from infini_llama.tasks.patch_environment.planning.estimate import CHECKPOINT_SPACE
from infini_llama.tasks.patch_environment.planning.findings import assess
from infini_llama.tasks.patch_environment.planning.plan import explicit, resolve
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.patch_environment.probe.probe import probe, probe_by_srun
from infini_llama.tasks.records.machine import Disk, MachineFacts
from infini_llama.tasks.records.plan import (
    EnvironmentPlan,
    EnvironmentRecord,
    PatchedEnvironment,
    PatchSummary,
    PinnedSettings,
)
from infini_llama.tasks.runs.run_folder import RunFolder

log = logging.getLogger("infini_llama.environment")


def patch_environment(
    config: PipelineConfig, run_name: str, vocab_size: int | None = None, machine: Machine | None = None
) -> PatchedEnvironment:
    """The plan of a run: the one pinned at its first attempt if there is one, else a new one.

    Nothing is written: the training stage writes the record as environment.json once it has locked the run, so that a command
    that is refused does not change what a running job has pinned.

    An explicit setting that differs from the pinned one is followed, and a pinned setting that this machine does not support is
    not. Both are logged as a warning, since the run is then no longer bitwise the one that began.

    Args:
        vocab_size: the dataset's; None: the configuration's.

    Raises:
        ConfigError: the configuration sets what this machine cannot run, or the home folder cannot be written.
        PipelineError: the disk is full, or too small for a single checkpoint.
    """
    if vocab_size is not None:
        config = config.with_vocab_size(vocab_size)
    home = config.runtime.home
    if config.environment.launcher == "srun" and "SLURM_JOB_ID" not in os.environ:
        facts = probe_by_srun(config)  # the nodes are other machines than this one
    else:
        facts = probe(home, config, machine)
    _check_disk(facts.disk, home)
    run = RunFolder(home / "runs" / run_name)
    before = run.find(EnvironmentRecord, run.environment)
    plan = resolve(config, facts, before and before.pinned)
    if before is None:
        pinned = plan.pinned()
    else:
        _log_differences(before.pinned, before.facts, plan, facts)
        # What this machine does not support stays pinned: the run returns to it on a machine that does.
        pinned = PinnedSettings.from_json(before.pinned.to_json() | explicit(config))
    _check_findings(plan, facts)
    record = EnvironmentRecord(
        pinned=pinned,
        pinned_at=before.pinned_at if before else datetime.now(UTC).isoformat(timespec="seconds"),
        plan=plan.masked(),
        patches=tuple(summarize(patch) for patch in PATCHES if patch.name in plan.patches),
        facts=facts,
    )
    log.info(
        "%s, %d worker(s) x %d thread(s), %s, %s, compile %s, allocator %s, %s",
        plan.device,
        plan.nproc_per_node,
        plan.threads,
        plan.precision,
        plan.attention_backend,
        plan.compile,
        plan.allocator,
        plan.distributed_backend,
    )
    if plan.device == "cuda" and (reason := plan.reasons.get("attention_backend")):
        log.info("attention by %s: %s", plan.attention_backend, reason)
    return PatchedEnvironment(plan=plan, record=record)


def summarize(patch: Patch) -> PatchSummary:
    return PatchSummary(name=patch.name, fault=patch.fault, reference=patch.reference)


def _log_differences(
    pinned: PinnedSettings, facts_then: MachineFacts, plan: EnvironmentPlan, facts: MachineFacts
) -> None:
    for one in differences(pinned, facts_then, plan, facts):
        level = logging.INFO if one.exactness == "kept" else logging.WARNING
        since = "in this run so far" if one.exactness == "lost" else "at the last attempt"
        log.log(level, "%s was %s %s and is %s now: %s.", one.name, one.then, since, one.now, one.sentence)


def _check_findings(plan: EnvironmentPlan, facts: MachineFacts) -> None:
    for found in plan.findings:
        if found.name == CHECKPOINT_SPACE and found.severity == "error":
            raise PipelineError(f"{found.value}. {found.sentence} Then run the same command again.")
    for found in [*assess(facts), *plan.findings]:
        if found.severity in ("warning", "error"):
            log.warning("%s: %s. %s", found.name, found.value, found.sentence)


def _check_disk(disk: Disk, home: Path) -> None:
    if disk.works:
        return
    if disk.fault in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)):
        raise PipelineError(f"no space at {disk.path} ({disk.fault}); free space and run the same command again.")
    raise ConfigError(
        f"runtime.home={home}: writing, syncing or renaming fails at {disk.path} ({disk.fault}); choose another folder."
    )
