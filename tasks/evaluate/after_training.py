"""The optional last stage of a run: what `evaluate.after_training` asks for, measured once for the same checkpoint."""

import logging
from pathlib import Path
from typing import Any

from infini_llama.tasks.evaluate.stage import RESULTS, evaluate, find_passkeys
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.load import find_checkpoint
from infini_llama.tasks.runs.run_folder import EvaluationLine
from infini_llama.tasks.storage.artifacts import read_manifest
from infini_llama.tasks.storage.json_lines import read_lines

log = logging.getLogger("infini_llama.evaluate")
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def evaluate_trained(run_dir: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """{"perplexity": …, "passkey": …} as `evaluate` and `find_passkeys` give them, as far as `wanted["after_training"]` names them.

    Args:
        wanted: the section `evaluate` of the configuration.

    Raises:
        ConfigError, DataError: as those functions do.
    """
    found = {}
    for kind in wanted["after_training"]:
        asked = {name: value for name, value in wanted.items() if name != "after_training"}
        chosen = find_checkpoint(run_dir, wanted["checkpoint"])
        asked |= {"checkpoint": chosen.name, "digest": read_manifest(chosen, checkpoints.KIND).digest}
        if (before := _known(run_dir, kind, asked)) is not None:
            log.info("%s of %s was measured before", kind, asked["checkpoint"])
            found[kind] = before
            continue
        log.info("measuring %s of %s", kind, asked["checkpoint"])
        if kind == "perplexity":
            found[kind] = evaluate(run_dir, asked["checkpoint"], sequences=wanted["sequences"], asked=asked)
        else:
            lengths, samples = wanted["passkey_lengths"], wanted["passkey_samples"]
            found[kind] = find_passkeys(run_dir, asked["checkpoint"], lengths, DEPTHS, samples, seed=0, asked=asked)
    return found


def _known(run_dir: Path, kind: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier command has measured by the same settings on the same checkpoint."""
    name = {"perplexity": "evaluate", "passkey": "passkey"}[kind]
    for record in reversed(read_lines(run_dir / RESULTS, EvaluationLine)):
        if record["kind"] == name and record.get("asked") == asked:
            return {key: value for key, value in record.items() if key not in ("kind", "measured")}
    return None
