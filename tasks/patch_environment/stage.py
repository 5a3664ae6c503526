"""The patch-environment stage: probe, resolve, pin. Nothing but the workers' own environment is ever changed."""

import errno
import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, PipelineError
from tasks.artifacts import write_atomic
from tasks.patch_environment.findings import finding, judge
from tasks.patch_environment.patches.registry import needed
from tasks.patch_environment.pin import EXACT, follow, say_what_changed, to_pin
from tasks.patch_environment.plan import resolve
from tasks.patch_environment.probe import probe
from tasks.secrets import masked

log = logging.getLogger("infini_llama.environment")
SEVERITIES = ("error", "warning", "note", "ok")


def patch_environment(config: dict, home: str, run: str) -> dict[str, Any]:
    """The plan of run `run`: the one pinned at its first attempt where there is one, else a new one, pinned now.

    An explicit setting that differs from the pin is followed, and a machine that cannot follow the pin is not made to; both are
    said aloud, since the run is then no longer bitwise the one that began.

    Raises:
        ConfigError: the configuration asks for what this machine has not, or `home` cannot be written.
        PipelineError: the disk is full.
    """
    facts = probe(Path(home))
    path = Path(home) / "runs" / run / "environment.json"
    _refuse_bad_disk(facts["disk"], home)
    pinned = _read(path)
    plan = follow(config, facts, pinned["pinned"]) if pinned else resolve(config, facts)
    if pinned:
        say_what_changed(pinned["pinned"], pinned["facts"], plan, facts)
    for found in [*judge(facts), *plan["findings"]]:
        if found["severity"] in ("warning", "error"):
            log.warning("%s: %s. %s", found["name"], found["value"], found["sentence"])
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "pinned": to_pin(config, plan, pinned["pinned"] if pinned else {}),
        "pinned_at": pinned["pinned_at"] if pinned else datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan | {"env": masked(plan["env"])},
        "patches": [patch.describe() for patch in needed(config, facts)],
        "facts": facts,
    }
    write_atomic(path, json.dumps(record, indent=1))
    log.info(
        "%s, %d worker(s) x %d thread(s), %s, %s, %s",
        *(
            plan[name]
            for name in ("device", "nproc_per_node", "threads", "precision", "attention_backend", "distributed_backend")
        ),
    )
    return plan


def _refuse_bad_disk(disk: dict, home: str) -> None:
    if disk["works"]:
        return
    if disk["fault"] in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)):
        raise PipelineError(f"no space at {disk['path']} ({disk['fault']}); free space and run the same command again.")
    raise ConfigError(
        f"runtime.home={home}: writing, syncing or renaming fails at {disk['path']} ({disk['fault']}); choose another folder."
    )


def _read(path: Path) -> dict[str, Any] | None:
    """What an earlier attempt pinned, None where there was none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not set(EXACT) <= set(record["pinned"]) or not {"python", "cpu", "gpus", "versions"} <= set(record["facts"]):
            raise KeyError("settings or facts")
        return record
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s cannot be used (%s: %s) and is written anew: nothing proves that this attempt runs like the earlier ones.",
            path,
            type(error).__name__,
            error,
        )
        return None


def doctor(config: dict | None = None, home: str = "workspace") -> dict[str, Any]:
    """The report of `infini-llama doctor`, worst first: {"findings", "facts", "plan", "exit_code"}.

    The plan is None without a configuration, and where this machine cannot meet it; then each wish that it cannot meet is a
    finding of severity error. `exit_code` is 64 where there is any error, else 0.
    """
    facts = probe(Path(home))
    findings, plan = judge(facts), None
    if config is not None:
        try:
            plan = resolve(config, facts)
            findings += plan["findings"]
            plan["env"] = masked(plan["env"])
        except ConfigError as refused:
            findings += [finding("configuration", "refused", "error", line.strip()) for line in _lines(refused)]
    findings.sort(key=lambda found: SEVERITIES.index(found["severity"]))
    failed = any(found["severity"] == "error" for found in findings)
    return {
        "findings": findings,
        "facts": facts,
        "plan": plan,
        "exit_code": ConfigError.exit_code if failed else 0,
    }


def _lines(refused: ConfigError) -> list[str]:
    return str(refused).splitlines()[1:]
