"""The training stage: takes the run's folder and makes attempts until the run is finished or somebody else must act."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from infini_llama.configs.architecture import architecture
from infini_llama.configs.deepspeed import TAKEN, engine_settings
from infini_llama.configs.errors import ConfigError, DataError, TrainFailed, disk_full_as
from infini_llama.tasks.patch_environment import pin
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.outcome import Outcome
from infini_llama.tasks.runs.run_folder import RunFolder, attempts, read_metrics
from infini_llama.tasks.storage.artifacts import Lock, write_atomic
from infini_llama.tasks.storage.lease import Lease
from infini_llama.tasks.train.adapt import halve_micro_batch, roll_back
from infini_llama.tasks.train.attempt import attempt
from infini_llama.tasks.train.curriculum import in_samples, refuse_stages
from infini_llama.tasks.train.gpu_locks import gpus_of, held
from infini_llama.tasks.train.grace import grace_period
from infini_llama.tasks.train.initial import initial_of
from infini_llama.tasks.train.launch import LocalLauncher
from infini_llama.tasks.train.launcher import Launcher
from infini_llama.tasks.train.length import in_steps
from infini_llama.tasks.train.lineage import claim

log = logging.getLogger("infini_llama.train")
LOCAL = LocalLauncher()
# Training settings that may be left to the environment's plan.
PLANNED = ("micro_batch_size", "compile")


class _Summary(BaseModel):
    """The types of what a finished run's summary is read for."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    run: str
    steps: int
    stopped_early: int | None = None
    sample: str
    validation_loss: float | None
    validation_bits_per_token: float | None
    unigram_entropy_bits: float
    bits_per_byte: float | None
    tokens: int
    tokens_per_second: float


def train(
    config: dict,
    reference: dict,
    plan: dict,
    invocation: str,
    launcher: Launcher = LOCAL,
    each_poll: Callable[[], None] = lambda: None,
) -> dict:
    """Trains the run `config["runtime"]["name"]` on the dataset `reference` under the environment plan `plan`, which is pinned here.

    Who acts on which end of an attempt stands in docs/resume.md; here: a request to the workers (75), a hang (76), no memory
    (71) and divergence (72) lead to another attempt at once.

    Args:
        invocation: of `attempt.new_invocation`, the same for all calls of one command: what `runtime.resume` says is followed
            once for each.
        launcher: what starts the workers; by default torchrun on this machine alone.
        each_poll: called a few times a second; what it raises is a request to stop, as a signal is, and a failure where it is an
            Exception.

    Returns:
        the summary (also runs/<name>/summary.json); `"already_finished": True` when there was nothing left to do.

    Raises:
        ConfigError, DataError: nobody retries.
        Preempted: this process was asked to stop; a checkpoint is committed.
        TrainFailed: the workers failed; `retryable` says whether another call may help.
        Busy: another process, here or on another machine, trains this run.
    """
    config = config | {"train": config["train"] | {name: plan[name] for name in PLANNED if name in plan}}
    home = Path(config["runtime"]["home"]).resolve()
    run = RunFolder(home / "runs" / config["runtime"]["name"])
    run.path.mkdir(parents=True, exist_ok=True)
    with (
        disk_full_as(f"the run in {run.path}", TrainFailed),
        Lock(run.path / "lock", wait=grace_period(run, config["runtime"]) + 5) as lock,
        Lease(run.path / "lease") as lease,
    ):

        def poll() -> None:
            lease.check()
            each_poll()

        initial = initial_of(config, run.read_lineage())
        model = architecture(config["model"], (initial or reference)["vocab_size"], reference["sequence_length"])
        config = config | {"train": in_steps(config["train"], reference, home)}
        config = config | {"train": config["train"] | deepspeed(config["train"], plan)}
        refuse_stages(config)  # before the run is bound to them
        lineage = claim(run, config, model, reference, initial)
        plan = pin.write(run.path / "environment.json", plan)
        stages = in_samples(config, reference, lineage["curriculum_ends"])
        told = config | {"data": config["data"] | {"curriculum": stages}}
        if summary := finished(run, config["train"]):
            log.info("run %s is finished: %d steps, nothing to do", run.path.name, summary["steps"])
            return summary | places(run, summary["steps"]) | {"already_finished": True}
        here = config["environment"]["launcher"] == "local"
        with held(gpus_of(run, plan) if here else [], poll) as gpus:
            while True:
                outcome = attempt(run, launcher, [lock, *gpus], told, model, reference, plan, invocation, poll)
                if outcome.kind == "done":
                    return summarize(run, config, reference)
                if not should_retry(run, config, plan, invocation, outcome):
                    raise failure(outcome)


def deepspeed(train: dict, plan: dict) -> dict[str, Any]:
    """What DeepSpeed's JSON alone decides in place of its path, so that the run keeps it; refused where it does not fit the run.

    What agrees with the run's own keys is left out: a micro-batch that is halved for want of memory would no longer.
    """
    if train["parallel"] != "deepspeed":
        return {}
    settings = engine_settings(train, plan["precision"], plan["nproc_per_node"] * plan["nnodes"])
    return {"deepspeed_config": {name: value for name, value in settings.items() if name in TAKEN}}


def should_retry(run: RunFolder, config: dict, plan: dict, invocation: str, outcome: Outcome) -> bool:
    """Whether this stage itself makes another attempt, having prepared it."""
    if outcome.code == 75:
        log.warning("the workers were asked to stop and %s; carrying on at once", outcome.message)
        return True
    if outcome.code == 76:
        log.warning("%s; the workers were ended", outcome.message)
        return hangs_without_progress(run, invocation) <= config["runtime"]["retries"]
    if outcome.code == 71:
        log.warning("out of memory: %s", outcome.message)
        return halve_micro_batch(run, config["train"], plan["nproc_per_node"] * plan["nnodes"])
    if outcome.code == 72:
        log.warning("diverged: %s", outcome.message)
        return roll_back(run, outcome.details, config["runtime"]["max_rollbacks"])
    return False


def hangs_without_progress(run: RunFolder, invocation: str) -> int:
    """Hung attempts of this command since the checkpoint that is the newest now."""
    step = checkpoints.latest_step(run.checkpoints)
    mine = [record for record in attempts(run) if record.get("invocation") == invocation]
    return sum(record["code"] == 76 and record.get("checkpoint_step") == step for record in mine)


def finished(run: RunFolder, train: dict) -> dict | None:
    """The summary of a run that has taken all its steps or more, or stopped early by these settings, and whose last checkpoint is whole.

    A summary that cannot be read is none: the attempt that follows has no step left to do and writes it again.
    """
    if not (summary := run.read_or_rebuild(run.summary)):
        return None
    try:
        _Summary.model_validate(summary)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        log.warning("%s: %s: %s; it is written again.", run.summary, ".".join(map(str, first["loc"])), first["msg"])
        return None
    early = summary.get("stopped_early")
    done = summary["steps"] >= train["max_steps"] or (early is not None and early == train["early_stopping_patience"])
    return summary if done and summary["steps"] == checkpoints.latest_step(run.checkpoints) else None


def failure(outcome: Outcome) -> Exception:
    """The exception for a failed attempt; unexpected ends (70) may be tried again, which `retries.py` decides."""
    if outcome.code == ConfigError.exit_code:
        return ConfigError(outcome.message)
    if outcome.code == DataError.exit_code:
        return DataError(outcome.message)
    return TrainFailed(outcome.message, exit_code=outcome.code, retryable=outcome.code == TrainFailed.exit_code)


def summarize(run: RunFolder, config: dict, reference: dict) -> dict:
    """Writes summary.json of a finished run."""
    records = read_metrics(run)
    trained = [record for record in records if record["kind"] == "train"]
    losses = [record["loss"] for record in trained if record["loss"] is not None]
    validated = [record for record in records if record["kind"] == "validation"]
    seconds = sum(record["step_time"] for record in trained)
    last = validated[-1] if validated else {"loss": None, "bits_per_byte": None}
    result = run.read(run.path / "result.json")
    tokens = checkpoints.read_state(checkpoints.checkpoint_path(run.checkpoints, result["steps"])).tokens
    finite = [record["loss"] for record in validated if record["loss"] is not None]
    summary = {
        "run": run.path.name,
        **result,
        "train_loss": losses[-1] if losses else None,
        "validation_loss": last["loss"],
        "validation_bits_per_token": None if last["loss"] is None else last["loss"] / math.log(2),
        "unigram_entropy_bits": reference["validation"]["unigram_entropy_bits"],
        "bits_per_byte": last["bits_per_byte"],
        "best_validation_loss": min(finite) if finite else None,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "updates_left_out": len(trained) - len(losses),
        "attempts": len(attempts(run)),
        "goodput": goodput(run),
    } | places(run, result["steps"])
    write_atomic(run.summary, json.dumps(summary, indent=1))
    return summary


def places(run: RunFolder, steps: int) -> dict:
    """Where the finished run's files are now; a folder may have been moved since the summary was written."""
    paths = {
        "run": run.path,
        "tensorboard": run.path / "tensorboard",
        "loss_curve": run.path / "loss.png",  # written by whoever called, as the page is
        "report": run.path / "report.html",
    }
    return {
        "checkpoint": str(checkpoints.checkpoint_path(run.checkpoints, steps)),
        "paths": {name: str(path) for name, path in paths.items()},
    }
