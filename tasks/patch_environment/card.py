"""What patch-environment found, chose and mended, as Markdown for Prefect's page of the run."""

from infini_llama.tasks.formatting import cell, in_bytes, table
from infini_llama.tasks.patch_environment.finding import SEVERITIES


def card(record: dict, findings: list[dict]) -> str:
    """The machine, the plan with its reasons, what deserves attention (worst first), and the patches.

    Args:
        record: environment.json.
        findings: of `judge` and of the plan.
    """
    plan = record["plan"]
    settings = {name: value for name, value in plan.items() if name not in ("env", "reasons", "findings", "patches")}
    lines = ["## What was found", "", *table(("what", "value"), _machine(record["facts"]))]
    versions = [f"{name} {version}" for name, version in record["facts"]["versions"].items() if version]
    lines += [f"With {', '.join(versions)}.", "", "## What was chosen", ""]
    lines += table(("setting", "value"), ((name, _value(value)) for name, value in settings.items()))
    lines += ["### Why", ""]
    # Not in the table, whose cells Prefect does not wrap.
    reasons = [(name, plan["reasons"].get(name)) for name in settings]
    lines += [f"- {name}: {cell(why)}" for name, why in reasons if why] or ["As the configuration says."]
    told = sorted(
        (one for one in findings if one["severity"] != "ok"), key=lambda one: SEVERITIES.index(one["severity"])
    )
    lines += ["", "## What deserves attention", ""]
    lines += [
        f"- **{one['severity']}** {one['name']}: {cell(_value(one['value']))}. {cell(one['sentence'])}" for one in told
    ] or ["Nothing."]
    lines += ["", "## What was patched in this run's workers", ""]
    lines += [f"- [{patch['name']}]({patch['reference']}): {patch['fault']}" for patch in record["patches"]] or [
        "Nothing."
    ]
    return "\n".join(lines)


def _machine(facts: dict) -> list[tuple[str, str]]:
    memory, disk = facts["memory"], facts["disk"]
    gpus = [f"{gpu['name']} ({in_bytes(gpu['memory'])})" for gpu in facts["gpus"]]
    return [
        ("machine", f"{facts['host']}, {facts['cpu']['model']}, {facts['cores']} core(s)"),
        ("memory", f"{in_bytes(memory['total'])}, {in_bytes(memory['available'])} of it free"),
        ("GPUs", ", ".join(gpus) or "none"),
        ("disk", f"{disk['kind'] or 'unknown'}, {in_bytes(disk['free'])} free"),
        ("Python", f"{facts['python']}"),
    ]


def _value(value: object) -> str:
    """Without Python's punctuation."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return "none" if value is None else str(value)
