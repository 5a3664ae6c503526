"""The patch-environment stage: probe, resolve, pin. Nothing but the workers' own environment is ever changed."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from tasks.artifacts import write_atomic
from tasks.patch_environment.plan import judge, resolve
from tasks.patch_environment.probe import probe

log = logging.getLogger("infini_llama.environment")
# What decides the bits of a result, beside the seed and the data.
EXACT = ("device", "nproc_per_node", "precision", "attention_backend", "threads")


def patch_environment(config: dict, home: str, run: str) -> dict[str, Any]:
    """The plan of run `run`: the one pinned at its first attempt where there is one, else a new one, pinned now.

    An explicit setting that differs from the pin is followed, and a machine that cannot follow the pin is not made to; both are
    said aloud, since the run is then no longer bitwise the one that began.

    Raises:
        ConfigError: the configuration asks for what this machine has not.
    """
    facts = probe(Path(home))
    path = Path(home) / "runs" / run / "environment.json"
    pinned = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if pinned is None:
        plan = resolve(config, facts)
    else:
        plan = _follow_pin(config, facts, pinned["plan"])
        for name, before in pinned["facts"]["versions"].items():
            if (now := facts["versions"].get(name)) != before and name in ("torch", "numpy"):
                log.warning(
                    "%s was %s when the run began and is %s now: the result may no longer be bitwise the same.",
                    name,
                    before,
                    now,
                )
    for finding in judge(facts):
        if finding["severity"] in ("warning", "error"):
            log.warning("%s: %s %s", finding["name"], finding["value"], finding["sentence"])
    path.parent.mkdir(parents=True, exist_ok=True)
    pinned_at = pinned["pinned_at"] if pinned else time.time()
    write_atomic(path, json.dumps({"plan": plan, "facts": facts, "pinned_at": pinned_at}, indent=1))
    log.info(
        "%s, %d worker(s) x %d thread(s), %s, %s, %s",
        *(
            plan[name]
            for name in ("device", "nproc_per_node", "threads", "precision", "attention_backend", "distributed_backend")
        ),
    )
    return plan


def _follow_pin(config: dict, facts: dict, pin: dict) -> dict[str, Any]:
    """A plan with the pinned settings wherever the configuration leaves them open."""
    wishes = config["environment"]
    kept = {name: pin[name] for name in EXACT if wishes[name] == "auto"}
    try:
        plan = resolve(config | {"environment": wishes | kept}, facts)
    except ConfigError as fault:
        plan = resolve(config, facts)
        log.warning("this machine cannot follow the plan that the run began with (%s)", fault)
    for name in EXACT:
        if plan[name] != pin[name]:
            log.warning(
                "%s was %s when the run began and is %s now: the result is no longer bitwise the same.",
                name,
                pin[name],
                plan[name],
            )
    return plan


def doctor(config: dict | None = None, home: str = "workspace") -> dict[str, Any]:
    """The report of `infini-llama doctor`: {"findings", "facts", "plan"}; the plan only where a configuration is given.

    Raises:
        ConfigError: the configuration asks for what this machine has not.
    """
    facts = probe(Path(home))
    return {"findings": judge(facts), "facts": facts, "plan": resolve(config, facts) if config else None}
