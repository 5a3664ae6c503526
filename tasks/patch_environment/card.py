"""What patch-environment found, chose and patched, as Markdown for Prefect's page of the run."""

from infini_llama.tasks.document import Document, bullets, cell, facts, markdown, part, section
from infini_llama.tasks.formatting import Cells, in_bytes
from infini_llama.tasks.patch_environment.planning.findings import assess
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import SEVERITIES, EnvironmentPlan, EnvironmentRecord


def card(record: EnvironmentRecord, plan: EnvironmentPlan) -> str:
    """The machine, the plan with its reasons, what needs attention (worst first), and the patches."""
    versions = [f"{name} {version}" for name, version in record.facts.versions.items() if version]
    settings = plan.model_dump(exclude={"env", "reasons", "findings", "patches"})
    reasons = (f"{name}: {cell(plan.reasons[name])}" for name in settings if plan.reasons.get(name))
    findings = [found for found in [*assess(record.facts), *plan.findings] if found.severity != "ok"]
    findings.sort(key=lambda found: SEVERITIES.index(found.severity))
    attention = (
        f"**{found.severity}** {found.name}: {cell(found.value)}. {cell(found.sentence)}" for found in findings
    )
    patches = (f"[{cell(patch.name)}]({patch.reference}): {cell(patch.fault)}" for patch in record.patches)
    chosen = {name: _value(value) for name, value in settings.items()}
    parts = (
        *section("What was found", facts(_machine(record.facts)), cell(f"With {', '.join(versions)}.")),
        *section("What was chosen", facts(chosen), part("Why", bullets(reasons) or "As the configuration says.")),
        *section("What needs attention", bullets(attention) or "Nothing."),
        *section("What was patched in this run's workers", bullets(patches) or "Nothing."),
    )
    return markdown(Document("Environment", parts))


def _machine(machine: MachineFacts) -> Cells:
    free = machine.disk.free
    gpus = [f"{gpu.name} ({in_bytes(gpu.memory)})" for gpu in machine.gpus]
    return {
        "machine": f"{machine.host}, {machine.cpu.model}, {machine.cores} core(s)",
        "memory": f"{in_bytes(machine.memory.total)}, {in_bytes(machine.memory.available)} of it free",
        "GPUs": ", ".join(gpus) or "none",
        "disk": f"{machine.disk.kind or 'unknown'}, {in_bytes(free) if free is not None else 'unknown'} free",
        "Python": machine.python,
    }


def _value(value: object) -> str:
    """Without Python's punctuation."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return "none" if value is None else str(value)
