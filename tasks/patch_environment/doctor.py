"""The report of `infini-llama doctor`: this machine, and what a run would use of it.

It can also list what has changed since another run.
"""

from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.findings import assess
from infini_llama.tasks.patch_environment.patches import needed_patches
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.patch_environment.requirements import unmet
from infini_llama.tasks.patch_environment.stage import (
    Difference,
    Exactness,
    differences,
)
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import (
    SEVERITIES,
    EnvironmentPlan,
    EnvironmentRecord,
    Finding,
    PatchSummary,
    Severity,
    finding,
)
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.run_folder import RunFolder

WARNED = 1  # the exit code of a strict report with a warning
RESUME: dict[Exactness, str] = {
    "lost": "is no longer bitwise the same",
    "doubtful": "may no longer be bitwise the same",
    "kept": "stays bitwise the same",
}


class RunDifferences(Record):
    """Differences from the environment of `run`.

    Attributes:
        resume: whether its resume on this machine stays bitwise the same.
    """

    run: str
    resume: str
    differences: tuple[Difference, ...]


class DoctorReport(Record):
    """The result of `doctor`.

    Attributes:
        findings: worst first; a setting that this machine cannot run is one of severity error.
        plan: None without a configuration, and if this machine cannot run it.
        patches: those whose faults the installed packages have.
        exit_code: 64 if there is an error, 1 if it is strict and there is a warning, else 0.
    """

    findings: tuple[Finding, ...]
    plan: EnvironmentPlan | None
    patches: tuple[PatchSummary, ...]
    against: RunDifferences | None
    facts: MachineFacts
    exit_code: int


def doctor(
    config: PipelineConfig | None = None,
    home: Path = Path("workspace"),
    against: Path | None = None,
    machine: Machine | None = None,
    strict: bool = False,
) -> DoctorReport:
    """Check this machine, and whether it can run the configuration.

    Args:
        against: folder of a run to compare with.
        strict: a warning is no success.

    Raises:
        ConfigError: there is no environment of a run in `against`.
    """
    facts = probe(home, config, machine)
    findings = assess(facts)
    begun = None if against is None else _environment_of(against)
    pinned = None if begun is None else begun.pinned
    plan: EnvironmentPlan | None = None
    if config is not None:
        refusals = unmet(config)
        try:
            plan = plan_environment(config, facts, pinned).masked()
            findings += plan.findings
        except ConfigError as refused:
            refusals = list(dict.fromkeys([*refused.problems, *refusals]))
        findings += [
            finding("configuration", "refused", "error", sentence)
            for sentence in refusals
        ]
    compared = None
    if against is not None and begun is not None:
        compared = _compare(against.name, begun, plan, facts)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return DoctorReport(
        findings=tuple(findings),
        plan=plan,
        patches=tuple(patch.summary() for patch in needed_patches(facts.versions)),
        against=compared,
        facts=facts,
        exit_code=_exit_code(findings[0].severity, strict),
    )


def _exit_code(worst: Severity, strict: bool) -> int:
    if worst == "error":
        return ConfigError.exit_code
    if strict and worst == "warning":
        return WARNED
    return 0


def _environment_of(run: Path) -> EnvironmentRecord:
    folder = RunFolder(run)
    record = folder.find(EnvironmentRecord, folder.environment)
    if record is None:
        raise ConfigError(
            f"{run} has no environment.json to compare with; "
            "give the folder of a run that was started."
        )
    return record


def _compare(
    run: str,
    begun: EnvironmentRecord,
    plan: EnvironmentPlan | None,
    facts: MachineFacts,
) -> RunDifferences:
    changes = differences(begun.pinned, begun.facts, plan, facts)
    worst = changes[0].exactness if changes else "kept"
    return RunDifferences(run=run, resume=RESUME[worst], differences=tuple(changes))
