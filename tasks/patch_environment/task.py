"""patch-environment as a Prefect task: a plan for this machine and this run.

Prefect neither caches nor stores it.
"""

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.document import (
    Document,
    bullets,
    cell,
    facts,
    markdown,
    section,
    subsection,
)
from infini_llama.tasks.formatting import Cells, in_bytes
from infini_llama.tasks.patch_environment import stage
from infini_llama.tasks.patch_environment.findings import assess
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import (
    SEVERITIES,
    EnvironmentRecord,
    PlannedEnvironment,
)
from infini_llama.tasks.report.artifact_keys import ArtifactKeys


@task(
    name="patch-environment",
    task_run_name="patch-environment-{page.run}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
def patch_environment(
    config: PipelineConfig, vocab_size: int, page: ArtifactKeys
) -> PlannedEnvironment:
    """Run `stage.patch_environment`, and show the record on the run's page.

    The result may hold the user's environment variables, so Prefect keeps no copy.
    """
    environment = stage.patch_environment(config, vocab_size)
    with best_effort("the environment's card"):
        create_markdown_artifact(
            card(environment.record),
            key=page.key("environment"),
            description=f"What run {page.run} is computed on",
        )
    return environment


def card(record: EnvironmentRecord) -> str:
    """Markdown for the run's page.

    It shows the machine, the plan with its reasons, what needs attention (worst first), and the
    patches.
    """
    plan = record.plan
    versions = [f"{name} {version}" for name, version in record.facts.versions.items()]
    settings = plan.model_dump(exclude={"env", "choices", "findings", "patches"})
    reasons = (f"{choice.setting}: {cell(choice.reason)}" for choice in plan.choices)
    all_findings = [*assess(record.facts), *plan.findings]
    findings = [finding for finding in all_findings if finding.severity != "ok"]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    attention = (
        f"**{finding.severity}** {finding.name}: {cell(finding.value)}. {cell(finding.sentence)}"
        for finding in findings
    )
    patches = (
        f"[{cell(patch.name)}]({patch.reference}): {cell(patch.fault)}"
        for patch in record.patches
    )
    parts = (
        *section(
            "What was found",
            facts(_machine(record.facts)),
            cell(f"With {', '.join(versions)}."),
        ),
        *section(
            "What was chosen",
            facts(settings),
            subsection("Why", bullets(reasons) or "As the configuration says."),
        ),
        *section("What needs attention", bullets(attention) or "Nothing."),
        *section(
            "What was patched in this run's workers", bullets(patches) or "Nothing."
        ),
    )
    return markdown(Document("Environment", parts))


def _machine(machine: MachineFacts) -> Cells:
    free = machine.disk.free
    gpus = [f"{gpu.name} ({in_bytes(gpu.memory)})" for gpu in machine.gpus]
    return {
        "machine": f"{machine.host}, {machine.cpu.model}, {machine.cores} core(s)",
        "memory": (
            f"{in_bytes(machine.memory.total)}, {in_bytes(machine.memory.available)} of it free"
        ),
        "GPUs": ", ".join(gpus) or "none",
        "disk": (
            f"{machine.disk.kind or 'unknown'}, "
            f"{in_bytes(free) if free is not None else 'unknown'} free"
        ),
        "Python": machine.python,
    }
