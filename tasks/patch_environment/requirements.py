"""What a configuration needs beyond the required packages: checked before any text is read, not by a worker hours later."""

import json
import logging
import os
import resource
import subprocess
import sys

from infini_llama.configs.deepspeed import read_json, refuse_contradictions
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment import import_trial
from infini_llama.tasks.patch_environment.planning.choices import refuse
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.probe.probe import probe

IMPORT_SECONDS = 120.0
FEWEST_FILES = 64  # open at the same time; torchrun and a worker together need more than 30
log = logging.getLogger("infini_llama.environment")


def check_requirements(config: PipelineConfig) -> None:
    """Refuse a configuration that names what is missing.

    Raises:
        ConfigError: one line per problem.
    """
    refuse(unmet(config))


def unmet(config: PipelineConfig) -> list[str]:
    """A sentence for each key that names a package, function or file which this machine's workers cannot use."""
    found: list[str] = []
    if config.environment.launcher == "local":  # else the workers' packages and limits are another machine's
        found += [*_few_files(), *_imports(config)]
    return [*found, *_deepspeed_json(config)]


def _few_files() -> list[str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= FEWEST_FILES:
        return []
    return [
        f"only {limit} files may be open at a time (ulimit -n), too few for torchrun; raise it with `ulimit -n 1024`."
    ]


def _imports(config: PipelineConfig) -> list[str]:
    """Imports are tried with the workers' own variables, in a process of their own."""
    train = config.train
    named = {
        "wandb": "train.report_to=wandb" if "wandb" in train.report_to else None,
        "deepspeed": "train.parallel=deepspeed" if train.parallel == "deepspeed" else None,
        train.metrics_hook: f"train.metrics_hook={train.metrics_hook}",
    }
    names = [name for name, setting in named.items() if name and setting]
    if not names:
        return []
    try:
        ended = subprocess.run(
            [sys.executable, import_trial.__file__, *names],
            env=os.environ | config.environment.env | {"PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=IMPORT_SECONDS,
        )
        faults = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("could not check whether the workers can import %s (%s)", ", ".join(names), error)
        return []
    return [f"{named[name]} {fault}" for name, fault in faults.items()]


def _deepspeed_json(config: PipelineConfig) -> list[str]:
    """Where DeepSpeed's JSON contradicts the run's own keys. A run that has begun is checked against its pinned plan later."""
    if config.train.parallel != "deepspeed":
        return []
    home = config.runtime.home
    try:
        given = read_json(config.train.deepspeed_config)
        if not given or (home / "runs" / config.runtime.name / "environment.json").exists():
            return []
        plan = resolve(config, probe(home, config))
        refuse_contradictions(config.train, plan.micro_batch_size, plan.precision, plan.world_size)
    except ConfigError as refused:
        return list(refused.problems)
    return []
