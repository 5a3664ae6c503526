"""Rows of results that several benchmarks store: what is known of the machine, a row that replaces the same case's earlier one, and
lines of cases that are stored as they end."""

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
    stored: dict[str, Any] = (
        json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    )
    row = {"load": os.getloadavg()[0]} | row
    kept = [
        old
        for old in stored.get("rows", [])
        if any(old.get(field) != row[field] for field in same)
    ]
    target.write_text(
        json.dumps(stored | {"rows": [*kept, row]}, indent=1) + "\n", encoding="utf-8"
    )


class CaseLines:
    """JSON lines of cases that have ended, one each; a program that was killed continues with the others.

    A line has the fields of its case, their names under `case`, and what was measured.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._ended = {
            _key({name: line[name] for name in line["case"]}) for line in self.read()
        }

    def read(self) -> list[dict[str, Any]]:
        """All lines; one that a kill cut short is removed."""
        text = self.target.read_text(encoding="utf-8") if self.target.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.target.write_text(whole, encoding="utf-8")
        return [json.loads(line) for line in whole.splitlines()]

    def __contains__(self, case: dict[str, Any]) -> bool:
        return _key(case) in self._ended

    def add(self, case: dict[str, Any], measured: dict[str, Any]) -> None:
        line = json.dumps(case | measured | {"case": [*case]})
        with self.target.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._ended.add(_key(case))
        print(line, flush=True)


def _key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)
