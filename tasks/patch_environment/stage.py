"""The patch-environment stage: it probes the machine and chooses the settings of a run.

A run keeps the settings of its first attempt. Nothing is patched here: the record names the
patches, and each worker applies them to its own process.
"""

import logging
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from infini_llama.configs.errors import PipelineError
from infini_llama.configs.reading import JsonObject, JsonValue
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.findings import assess
from infini_llama.tasks.patch_environment.patches import needed_patches
from infini_llama.tasks.patch_environment.plan import explicit, plan_environment
from infini_llama.tasks.patch_environment.probe import probe, probe_by_launcher
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import (
    EnvironmentPlan,
    EnvironmentRecord,
    PinnedSettings,
    PlannedEnvironment,
)
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    attempt_folders,
    read_attempt_plan,
)
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.filesystem import (
    require_temporary_folder,
    require_usable,
)

log = logging.getLogger("infini_llama.environment")
# Versions that determine how numbers are computed; the others only read data and report.
NUMERIC = ("torch", "numpy", "flash-attn", "triton")
Exactness = Literal["lost", "doubtful", "kept"]


def patch_environment(
    config: PipelineConfig,
    vocab_size: int | None = None,
    machine: Machine | None = None,
) -> PlannedEnvironment:
    """The plan of a run: the one pinned at its first attempt if there is one, else a new one.

    Nothing is written: the training stage writes the record as environment.json once it has locked
    the run, so that a command that is refused does not change what a running job has pinned.

    An explicit setting that differs from the pinned one is followed, and a pinned setting that this
    machine does not support is not. Both are logged as a warning, since the run is then no longer
    bitwise the one that began. On another device than the pinned one, every setting that the
    configuration leaves open is chosen anew.

    Args:
        vocab_size: the dataset's; None: the configuration's.

    Raises:
        ConfigError: the configuration sets what this machine cannot run, or the home folder cannot
            be written.
        PipelineError: the disk is full, or too small for a single checkpoint.
    """
    if vocab_size is not None:
        config = config.with_vocab_size(vocab_size)
    home = config.runtime.home
    if config.environment.started_by.allocates_nodes(os.environ):
        facts = probe_by_launcher(config)
    else:
        facts = probe(home, config, machine)
    require_usable(home, Path(facts.disk.path), facts.disk.fault)
    require_temporary_folder()
    run = RunFolder.of(config.runtime)
    before = run.find(EnvironmentRecord, run.environment)
    earlier = pinned_settings(run, before)
    plan = plan_environment(config, facts, earlier)
    if earlier is None:
        pinned = plan.pinned()
    else:
        facts_then = before.facts if before else facts
        _log_differences(earlier, facts_then, plan, facts)
        pinned = _pinned_again(earlier, config, plan)
    _refuse_errors(plan)
    for finding in [*assess(facts), *plan.findings]:
        if finding.severity in ("warning", "error"):
            log.warning("%s: %s. %s", finding.name, finding.value, finding.sentence)
    record = EnvironmentRecord(
        pinned=pinned,
        pinned_at=before.pinned_at
        if before
        else datetime.now(UTC).isoformat(timespec="seconds"),
        plan=plan.masked(),
        patches=tuple(patch.summary() for patch in needed_patches(facts.versions)),
        facts=facts,
    )
    _log_plan(plan)
    return PlannedEnvironment(plan=plan, record=record)


def _pinned_again(
    earlier: PinnedSettings, config: PipelineConfig, plan: EnvironmentPlan
) -> PinnedSettings:
    """The settings that the run keeps from now on: the earlier ones, and what was requested since.

    What this machine does not support stays pinned: the run returns to it on a machine that does.
    """
    requested = explicit(config)
    if requested.get("device", earlier.device) != earlier.device:
        return plan.pinned()
    workers = requested.get("nproc_per_node", earlier.nproc_per_node)
    if workers != earlier.nproc_per_node:
        requested["threads"] = plan.threads
    return PinnedSettings.model_validate(earlier.to_json() | requested)


def _refuse_errors(plan: EnvironmentPlan) -> None:
    for finding in plan.findings:
        if finding.severity == "error":
            raise PipelineError(
                f"{finding.value}. {finding.sentence} Then run the same command again."
            )


def pinned_settings(
    run: RunFolder, record: EnvironmentRecord | None
) -> PinnedSettings | None:
    """Settings that a run keeps; None before its first attempt.

    Args:
        record: of environment.json; where it is missing or damaged, the newest attempt whose plan
            can be read replaces it.
    """
    if record is not None:
        return record.pinned
    for attempt_dir in reversed(attempt_folders(run)):
        with suppress(Damaged):
            plan = read_attempt_plan(attempt_dir).plan
            log.warning(
                "%s is missing or damaged; the settings of %s are kept. "
                "Other versions or another processor since then go unnoticed.",
                run.environment,
                attempt_dir.name,
            )
            return plan.pinned()
    return None


def _log_plan(plan: EnvironmentPlan) -> None:
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
    by_reason: dict[str, list[str]] = {}
    for choice in plan.choices:
        by_reason.setdefault(choice.reason, []).append(
            f"{choice.setting}={choice.value}"
        )
    if not by_reason:
        return
    chosen = (
        f"{', '.join(settings)} ({reason})" for reason, settings in by_reason.items()
    )
    log.info("chosen: %s", "; ".join(chosen))


class Difference(Record):
    """A difference between two environments.

    Attributes:
        exactness: whether the result stays bitwise the same.
    """

    name: str
    then: JsonValue
    now: JsonValue
    exactness: Exactness
    sentence: str


def differences(
    pinned: PinnedSettings,
    facts_then: MachineFacts,
    plan: EnvironmentPlan | None,
    facts: MachineFacts,
) -> list[Difference]:
    """Differences between an earlier environment and this one, most harmful first.

    Args:
        plan: None compares the machines alone.
    """
    changes: list[Difference] = []
    if plan is not None:
        # The same number of ranks is only spread over machines otherwise.
        same_ranks = pinned.world_size == plan.world_size
        for name, then, now in _changed(pinned.to_json(), plan.pinned().to_json()):
            if same_ranks and name in ("nproc_per_node", "nnodes"):
                continue
            effect = PinnedSettings.model_fields[name].description
            sentence = f"the result is no longer bitwise the same ({effect})"
            changes.append(
                Difference(
                    name=name, then=then, now=now, exactness="lost", sentence=sentence
                )
            )
    for name, then, now in _changed(_decisive(facts_then), _decisive(facts)):
        sentence = "the result may no longer be bitwise the same"
        changes.append(
            Difference(
                name=name, then=then, now=now, exactness="doubtful", sentence=sentence
            )
        )
    for name, then, now in _changed(
        _without_effect(facts_then), _without_effect(facts)
    ):
        sentence = "this does not touch the result"
        changes.append(
            Difference(
                name=name, then=then, now=now, exactness="kept", sentence=sentence
            )
        )
    return changes


def _changed(
    then: JsonObject, now: JsonObject
) -> list[tuple[str, JsonValue, JsonValue]]:
    """Name, earlier value and value of what differs; None stands for what is absent."""
    return [
        (name, then.get(name), now.get(name))
        for name in then | now
        if then.get(name) != now.get(name)
    ]


def _decisive(facts: MachineFacts) -> JsonObject:
    """Facts on which the bits of a result may depend."""
    return {
        "python": facts.python,
        "the processor": facts.cpu.model,
        "the list of GPUs": list[JsonValue](gpu.name for gpu in facts.gpus),
        "the driver": facts.gpus[0].driver if facts.gpus else None,
        **{name: facts.versions.get(name) for name in NUMERIC},
    }


def _without_effect(facts: MachineFacts) -> JsonObject:
    """Facts that do not touch the bits of a result."""
    return {
        "host": facts.host,
        "platform": facts.platform,
        "cores": facts.cores,
        "memory in GiB": round(facts.memory.total / 1024**3),
        **{
            name: version
            for name, version in facts.versions.items()
            if name not in NUMERIC
        },
    }


def _log_differences(
    pinned: PinnedSettings,
    facts_then: MachineFacts,
    plan: EnvironmentPlan,
    facts: MachineFacts,
) -> None:
    for change in differences(pinned, facts_then, plan, facts):
        level = logging.INFO if change.exactness == "kept" else logging.WARNING
        since = (
            "in this run so far"
            if change.exactness == "lost"
            else "at the last attempt"
        )
        then, now = (
            "absent" if value is None else value for value in (change.then, change.now)
        )
        log.log(
            level,
            "%s was %s %s and is %s now: %s.",
            change.name,
            then,
            since,
            now,
            change.sentence,
        )
