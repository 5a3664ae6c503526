"""Rows of results that several benchmarks store: what is known of the machine, and a row that replaces the same case's earlier one."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infini_llama.tasks.machine import Machine, usable_cores
from infini_llama.tasks.patch_environment.machine import cpu


def about() -> dict[str, Any]:
    """Processor, usable cores, platform and torch."""
    machine = Machine()
    found = cpu(machine)
    return {
        "processor": found.model + (" with bf16" if found.bf16 else " without bf16"),
        "cores": usable_cores(machine),
        "platform": platform.platform(),
        "torch": torch.__version__,
    }


def store(target: Path, row: dict[str, Any], same: Sequence[str]) -> None:
    """Add `row`, with the load of this moment, to the rows of a JSON file, in place of one with equal fields `same`."""
    stored: dict[str, Any] = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    row = {"load": os.getloadavg()[0]} | row
    kept = [old for old in stored.get("rows", []) if any(old.get(field) != row[field] for field in same)]
    target.write_text(json.dumps(stored | {"rows": [*kept, row]}, indent=1) + "\n", encoding="utf-8")
