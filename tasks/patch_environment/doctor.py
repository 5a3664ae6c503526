"""The report of `infini-llama doctor`: what the machine can do, what a run would use, and what has changed since another run."""

from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.secrets import masked
from infini_llama.tasks.patch_environment.compare import DOUBTFUL, KEPT, LOST, differences
from infini_llama.tasks.patch_environment.finding import SEVERITIES, finding
from infini_llama.tasks.patch_environment.findings import judge
from infini_llama.tasks.patch_environment.patches.registry import PATCHES, needed
from infini_llama.tasks.patch_environment.plan import resolve
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.patch_environment.probe.probe import probe
from infini_llama.tasks.patch_environment.requirements import unmet
from infini_llama.tasks.patch_environment.stage import read_record

WARNED = 1
EXACTNESS = {
    KEPT: "stays bitwise the same",
    DOUBTFUL: "may no longer be bitwise the same",
    LOST: "is no longer bitwise the same",
}


def doctor(
    config: dict | None = None, home: str = "workspace", against: Path | None = None, machine: Machine | None = None
) -> dict[str, Any]:
    """The report, worst first: {"findings", "plan", "patches", "against", "facts", "exit_code"}.

    The plan is None without a configuration, and where this machine cannot meet it; then each wish that it cannot meet is a
    finding of severity error. `exit_code` is 64 where there is any error, 1 where there is any warning, else 0.

    Args:
        against: folder of a run; "against" then has the differences from its environment, and whether its resume stays exact.

    Raises:
        ConfigError: there is no environment of a run in `against`.
    """
    facts = probe(Path(home), config, machine, ask_hub=True)
    findings, plan = judge(facts), None
    if config is not None:
        try:
            plan = resolve(config, facts)
            findings += plan["findings"]
            plan["env"] = masked(plan["env"])
        except ConfigError as refused:
            lines = str(refused).splitlines()[1:]
            findings += [finding("configuration", "refused", "error", line.strip()) for line in lines]
        findings += [finding("configuration", "refused", "error", sentence) for sentence in unmet(config)]
    since = None if against is None else _compared(against, plan, facts)
    findings.sort(key=lambda found: SEVERITIES.index(found["severity"]))
    severities = {found["severity"] for found in findings}
    return {
        "findings": findings,
        "plan": plan,
        "patches": [patch.describe() | {"applies": patch in needed(config or {}, facts)} for patch in PATCHES],
        "against": since,
        "facts": facts,
        "exit_code": ConfigError.exit_code if "error" in severities else WARNED if "warning" in severities else 0,
    }


def _compared(run: Path, plan: dict | None, facts: dict) -> dict[str, Any]:
    record = read_record(run / "environment.json")
    if record is None:
        raise ConfigError(
            f"{run} has no environment.json of a run to compare with; name the folder of one that was started."
        )
    found = differences(record["pinned"], record["facts"], plan, facts)
    worst = next((kind for kind in (LOST, DOUBTFUL) if any(one["exactness"] == kind for one in found)), KEPT)
    return {"run": run.name, "resume": EXACTNESS[worst], "differences": found}
