"""The programs of benchmarks/ as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"


def program(name: str) -> ModuleType:
    """benchmarks/NAME.py; it imports the files beside it, as where it is started."""
    path = FOLDER / name
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.name)
