"""What patch-environment decided, as Markdown for Prefect's page of the run."""

from tasks.patch_environment.finding import SEVERITIES


def card(record: dict, findings: list[dict]) -> str:
    """The plan with its reasons, what deserves attention (worst first), and the patches.

    Args:
        record: environment.json.
        findings: of `judge` and of the plan.
    """
    plan = record["plan"]
    settings = {name: value for name, value in plan.items() if name not in ("env", "reasons", "findings", "patches")}
    lines = ["## Plan", "", "| setting | value | why |", "|---|---|---|"]
    lines += [
        f"| {name} | {_cell(value)} | {_cell(plan['reasons'].get(name, ''))} |" for name, value in settings.items()
    ]
    told = sorted(
        (one for one in findings if one["severity"] != "ok"), key=lambda one: SEVERITIES.index(one["severity"])
    )
    lines += ["", "## Findings", "", "| severity | what | value | cure |", "|---|---|---|---|"]
    lines += [
        f"| {one['severity']} | {one['name']} | {_cell(one['value'])} | {_cell(one['sentence'])} |" for one in told
    ]
    lines += ["", "## Patches of this run's workers", ""]
    lines += [f"- [{patch['name']}]({patch['reference']}): {patch['fault']}" for patch in record["patches"]] or ["none"]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
