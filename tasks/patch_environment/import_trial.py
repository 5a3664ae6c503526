"""Imports what a configuration names, as a worker would, in a process of its own: import_trial.py NAME...

Prints {name: fault} as JSON for each that cannot be used. Only the standard library is imported here.
"""

import importlib
import json
import sys
from contextlib import suppress


def fault_of_function(name: str) -> str | None:
    """What is wrong with a `module:function`."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        return f"cannot be imported ({error}); install its module, or name its folder in environment.env.PYTHONPATH."
    return None if callable(found) else "is not a function."


def fault_of_package(name: str) -> str | None:
    """What is wrong with an optional package, which has an extra of its own name."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"needs the package {name} ({error}): pip install 'infini-llama[{name}]', or change the key."
    return fault_of_login() if name == "wandb" else None


def fault_of_login() -> str | None:
    """W&B must not wait for a key to be typed."""
    wandb = importlib.import_module("wandb")
    with suppress(Exception):  # other versions of W&B may answer otherwise; then its own init decides
        if wandb.setup().settings.mode in ("online", "shared") and not wandb.api.api_key:
            return "needs a key: log in with `wandb login`, or set environment.env.WANDB_MODE=offline."
    return None


def main() -> None:
    faults = {}
    for name in sys.argv[1:]:
        fault = fault_of_function(name) if ":" in name else fault_of_package(name)
        if fault:
            faults[name] = fault
    print(f"\n{json.dumps(faults)}", flush=True)


if __name__ == "__main__":
    main()
