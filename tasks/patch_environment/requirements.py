"""Requirements of a configuration beyond the required packages.

They are checked before any text is read, not by a worker hours later. Packages and functions are
imported as a worker would, in a separate process: python -m MODULE NAME...
"""

import importlib
import json
import logging
import os
import pkgutil
import resource
import subprocess
import sys
from contextlib import suppress

from infini_llama.configs.deepspeed import read_json, refuse_contradictions
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.findings import limits
from infini_llama.tasks.patch_environment.machine import limit_of
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.runs.run_folder import RunFolder

IMPORT_SECONDS = 120.0
log = logging.getLogger("infini_llama.environment")


def check_requirements(config: PipelineConfig) -> None:
    """Refuse a configuration whose requirements this machine does not meet.

    These are packages, functions and files that it names, and limits of a process that are too
    tight for workers.

    Raises:
        ConfigError: one line per problem.
    """
    problems = unmet(config)
    if config.environment.started_by.has_local_workers:
        tight = limits(limit_of(resource.RLIMIT_NOFILE), limit_of(resource.RLIMIT_AS))
        problems += [
            f"{each.name}: {each.value}. {each.sentence}"
            for each in tight
            if each.severity == "error"
        ]
    if problems:
        raise ConfigError("this machine cannot run the configuration", problems)


def unmet(config: PipelineConfig) -> list[str]:
    """Keys that name a package, function or file which this machine's workers cannot use.

    Returns:
        a sentence per key.
    """
    problems: list[str] = []
    # Else the workers' packages are another machine's.
    if config.environment.started_by.has_local_workers:
        problems += _failing_imports(config)
    problems += _contradicting_deepspeed_json(config)
    return problems


def _failing_imports(config: PipelineConfig) -> list[str]:
    """A sentence for each import that fails in a separate process with the workers' variables."""
    train = config.train
    settings: dict[str, str] = {}
    if "wandb" in train.report_to:
        settings["wandb"] = "train.report_to=wandb"
    if train.parallel == "deepspeed":
        settings["deepspeed"] = "train.parallel=deepspeed"
    if train.metrics_hook:
        settings[train.metrics_hook] = f"train.metrics_hook={train.metrics_hook}"
    if not settings:
        return []
    try:
        ended = subprocess.run(
            [sys.executable, "-m", __name__, *settings],
            env=os.environ | config.environment.env | {"PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=IMPORT_SECONDS,
        )
        faults = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning(
            "could not check whether the workers can import %s (%s)",
            ", ".join(settings),
            error,
        )
        return []
    return [f"{settings[name]} {fault}" for name, fault in faults.items()]


def _contradicting_deepspeed_json(config: PipelineConfig) -> list[str]:
    """Contradictions between DeepSpeed's JSON and the run's own keys.

    A run that has begun is checked against its pinned plan later.
    """
    if config.train.parallel != "deepspeed":
        return []
    home = config.runtime.home
    try:
        fields = read_json(config.train.deepspeed_config)
        if not fields or RunFolder.of(config.runtime).environment.exists():
            return []
        plan = plan_environment(config, probe(home, config))
        refuse_contradictions(
            config.train, plan.micro_batch_size, plan.precision, plan.world_size
        )
    except ConfigError as refused:
        return list(refused.problems)
    return []


def fault_of_function(name: str) -> str | None:
    """Why a `module:function` cannot be used."""
    try:
        function = pkgutil.resolve_name(name)
    except Exception as error:
        return (
            f"cannot be imported ({error}); "
            "install its module, or name its folder in environment.env.PYTHONPATH."
        )
    return None if callable(function) else "is not a function."


def fault_of_package(name: str) -> str | None:
    """Why an optional package, which has an extra of its own name, cannot be used."""
    try:
        package = importlib.import_module(name)
    except Exception as error:
        return (
            f"needs the package {name} ({error}): "
            f"pip install 'infini-llama[{name}]', or change the key."
        )
    # W&B must not wait for a key to be typed.
    if name == "wandb":
        # Other versions of W&B may answer otherwise; then its own init decides.
        with suppress(Exception):
            if (
                package.setup().settings.mode in ("online", "shared")
                and not package.api.api_key
            ):
                return (
                    "needs a key: "
                    "log in with `wandb login`, or set environment.env.WANDB_MODE=offline."
                )
    return None


def main() -> None:
    faults = {
        name: fault_of_function(name) if ":" in name else fault_of_package(name)
        for name in sys.argv[1:]
    }
    print(
        f"\n{json.dumps({name: fault for name, fault in faults.items() if fault})}",
        flush=True,
    )


if __name__ == "__main__":
    main()
