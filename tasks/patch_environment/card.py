"""What patch-environment found, chose and patched, as Markdown for Prefect's page of the run."""

from infini_llama.tasks.formatting import cell, in_bytes, table
from infini_llama.tasks.patch_environment.planning.findings import assess
from infini_llama.tasks.records.environment import EnvironmentRecord
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import SEVERITIES, EnvironmentPlan


def card(record: EnvironmentRecord, plan: EnvironmentPlan) -> str:
    """The machine, the plan with its reasons, what needs attention (worst first), and the patches."""
    shown = plan.model_dump(exclude={"env", "reasons", "findings", "patches"})
    lines = ["## What was found", "", *table(("what", "value"), _machine(record.facts))]
    versions = [f"{name} {version}" for name, version in record.facts.versions.items() if version]
    lines += [f"With {', '.join(versions)}.", "", "## What was chosen", ""]
    lines += table(("setting", "value"), ((name, _value(value)) for name, value in shown.items()))
    lines += ["### Why", ""]
    # Not in the table, whose cells Prefect does not wrap.
    reasons = [(name, plan.reasons.get(name)) for name in shown]
    lines += [f"- {name}: {cell(why)}" for name, why in reasons if why] or ["As the configuration says."]
    findings = [found for found in [*assess(record.facts), *plan.findings] if found.severity != "ok"]
    findings.sort(key=lambda found: SEVERITIES.index(found.severity))
    lines += ["", "## What needs attention", ""]
    lines += [
        f"- **{found.severity}** {found.name}: {cell(found.value)}. {cell(found.sentence)}" for found in findings
    ] or ["Nothing."]
    lines += ["", "## What was patched in this run's workers", ""]
    lines += [f"- [{patch.name}]({patch.reference}): {patch.fault}" for patch in record.patches] or ["Nothing."]
    return "\n".join(lines)


def _machine(facts: MachineFacts) -> list[tuple[str, str]]:
    free = facts.disk.free
    gpus = [f"{gpu.name} ({in_bytes(gpu.memory)})" for gpu in facts.gpus]
    return [
        ("machine", f"{facts.host}, {facts.cpu.model}, {facts.cores} core(s)"),
        ("memory", f"{in_bytes(facts.memory.total)}, {in_bytes(facts.memory.available)} of it free"),
        ("GPUs", ", ".join(gpus) or "none"),
        ("disk", f"{facts.disk.kind or 'unknown'}, {in_bytes(free) if free is not None else 'unknown'} free"),
        ("Python", facts.python),
    ]


def _value(value: object) -> str:
    """Without Python's punctuation."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return "none" if value is None else str(value)
