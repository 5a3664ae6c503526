"""The training stage: takes the run's folder, starts torchrun from the newest good checkpoint, and acts on how it ends."""

import json
import logging
import math
import os
import socket
import time
from pathlib import Path

from configs.errors import ConfigError, DataError, Preempted, TrainFailed
from tasks.artifacts import Lock, write_atomic
from tasks.train import checkpoints, launcher
from tasks.train.outcome import Outcome, classify
from tasks.train.progress import Progress
from tasks.train.report import write_report
from tasks.train.run_folder import RunFolder, append_attempt, claim, cut_metrics, read_metrics, remove_staging

log = logging.getLogger("infini_llama.train")
# Tells the attempts of this process from those of earlier commands.
INVOCATION = f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"


def train(config: dict, reference: dict, plan: dict) -> dict:
    """Trains the run `config["runtime"]["name"]` on the dataset `reference` under the environment plan `plan`.

    Returns:
        the summary (also runs/<name>/summary.json); `"already_finished": True` when there was nothing left to do.

    Raises:
        ConfigError, DataError: nobody retries.
        Preempted: this process was asked to stop; a checkpoint is committed.
        TrainFailed: the workers failed; `retryable` says whether another call may help.
    """
    home = Path(config["runtime"]["home"]).resolve()
    run = RunFolder(home / "runs" / config["runtime"]["name"])
    grace = config["runtime"]["grace_period"]
    run.path.mkdir(parents=True, exist_ok=True)
    with Lock(run.path / "lock", wait=grace + 5) as lock:
        model = model_fields(config, reference)
        lineage = claim(run, config, model, reference)
        if summary := finished(run, config["train"]["max_steps"]):
            log.info("run %s is finished: %d steps, nothing to do", run.path.name, summary["steps"])
            return summary | {"already_finished": True}
        while True:
            outcome = attempt(run, lock, config, model, reference, plan, lineage)
            if outcome.kind == "done":
                return summarize(run, config, reference)
            if outcome.kind == "failed":
                raise failure(outcome)
            log.warning("the workers were asked to stop and %s; carrying on at once", outcome.message)


def model_fields(config: dict, reference: dict) -> dict:
    """The architecture in full: the configuration's, with what the dataset decides."""
    fields = dict(config["model"])
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or fields["num_attention_heads"]
    return fields | {"vocab_size": reference["vocab_size"], "max_position_embeddings": reference["sequence_length"]}


def finished(run: RunFolder, max_steps: int) -> dict | None:
    """The summary of a run that has reached `max_steps` and whose last checkpoint is whole."""
    summary = run.read(run.summary)
    if summary.get("steps") == max_steps == checkpoints.latest_step(run.checkpoints):
        return summary
    return None


def attempt(
    run: RunFolder, lock: Lock, config: dict, model: dict, reference: dict, plan: dict, lineage: dict
) -> Outcome:
    """One torchrun, from the checkpoint that `runtime.resume` names to its end."""
    remove_staging(run)
    resume = config["runtime"]["resume"]
    if resume in ("must", "never", "best") and tried_in_this_process(run):
        resume = "auto"  # the rule holds for the start of a command, not for its retries
    chosen = checkpoints.choose(run.checkpoints, resume, lineage.get("resumed_from"))
    if resume not in ("auto", "must", "never", "best"):
        write_atomic(run.lineage, json.dumps(lineage | {"resumed_from": resume}, indent=1))
        lineage["resumed_from"] = resume
    first_step = refuse_other_model(chosen, model, plan) if chosen else 0
    cut_metrics(run, first_step)

    number = account_for_killed(run) + 1
    attempt_dir = run.path / "logs" / f"attempt-{number:02d}"
    attempt_dir.mkdir(parents=True)
    home = Path(config["runtime"]["home"]).resolve()
    order = {
        "run_dir": str(run.path),
        "dataset": str(home / reference["path"]),
        "dataset_digest": reference["digest"],
        "chunks": reference["chunks"],
        "sequence_length": reference["sequence_length"],
        "verify_on_read": reference.get("verify_on_read", False),
        "resume_from": str(chosen) if chosen else None,
        "config": config,
        "model": model,
        "plan": plan,
    }
    write_atomic(attempt_dir / "order.json", json.dumps(order, indent=1))
    log.info(
        "attempt %d starts %s with %d worker(s)",
        number,
        f"from {chosen.name}" if chosen else "from step 0",
        plan["nproc_per_node"],
    )

    began, interrupted = time.time(), None
    progress = Progress(run, config["train"]["max_steps"], config["train"]["log_every"])
    process = launcher.start(attempt_dir / "order.json", plan, config["runtime"]["grace_period"], lock.fd)
    try:
        launcher.watch(process, progress.poll)
    except BaseException as raised:  # Ctrl-C, SIGTERM by the handlers of the caller, Prefect's cancellation
        log.warning("asked to stop; waiting up to %.0f s for a checkpoint", config["runtime"]["grace_period"])
        launcher.ask_to_stop(process, attempt_dir, plan["nproc_per_node"], config["runtime"]["grace_period"])
        interrupted = raised
    finally:
        launcher.end(process, attempt_dir, plan["nproc_per_node"])
    outcome = classify(
        process.returncode, launcher.read_statuses(attempt_dir, plan["nproc_per_node"]), str(attempt_dir)
    )
    step = checkpoints.latest_step(run.checkpoints)
    record = {
        "attempt": number,
        "invocation": INVOCATION,
        "from_step": first_step,
        "checkpoint_step": step,
        "seconds": time.time() - began,
    }
    append_attempt(run, record | {"kind": outcome.kind, "code": outcome.code, "message": outcome.message})
    if interrupted is not None and outcome.kind != "done":
        raise Preempted(
            f"run {run.path.name} was stopped; the newest checkpoint is at step {step}. Run the same command to carry on."
        ) from interrupted
    return outcome


def refuse_other_model(chosen: Path, model: dict, plan: dict) -> int:
    """Step of the checkpoint, once it is known to be of this architecture."""
    state = checkpoints.read_state(chosen)
    if state["model"] != model:
        differing = [
            f"model.{key}: {state['model'].get(key)} there, {value} here"
            for key, value in model.items()
            if state["model"].get(key) != value
        ]
        raise ConfigError(f"checkpoint {chosen} is of another architecture:\n  " + "\n  ".join(differing))
    if state["world_size"] != plan["nproc_per_node"]:
        log.warning(
            "the checkpoint was written by %d worker(s) and %d carry on: the same samples in the same order, but sums are rounded "
            "differently, so the run is no longer bitwise the uninterrupted one.",
            state["world_size"],
            plan["nproc_per_node"],
        )
    return state["step"]


def account_for_killed(run: RunFolder) -> int:
    """Number of attempts so far. One that left a folder but no record was killed together with the command that watched it."""
    number = sum(1 for _ in (run.path / "logs").glob("attempt-*"))
    recorded = {record["attempt"] for record in attempts(run)}
    for missing in sorted(set(range(1, number + 1)) - recorded):
        append_attempt(
            run,
            {"attempt": missing, "invocation": None, "kind": "failed", "code": 70, "message": "the command was killed"},
        )
    return number


def tried_in_this_process(run: RunFolder) -> bool:
    return any(record["invocation"] == INVOCATION for record in attempts(run))


def attempts(run: RunFolder) -> list[dict]:
    """Every attempt at this run, oldest first."""
    if not run.attempts.exists():
        return []
    return [json.loads(line) for line in run.attempts.read_text(encoding="utf-8").splitlines()]


def failure(outcome: Outcome) -> Exception:
    """The exception for a failed attempt; unexpected ends (70) may be tried again, which `retries.py` decides."""
    if outcome.code == ConfigError.exit_code:
        return ConfigError(outcome.message)
    if outcome.code == DataError.exit_code:
        return DataError(outcome.message)
    return TrainFailed(outcome.message, exit_code=outcome.code, retryable=outcome.code == TrainFailed.exit_code)


def summarize(run: RunFolder, config: dict, reference: dict) -> dict:
    """Writes report and summary.json of a finished run."""
    records = read_metrics(run)
    trained = [record for record in records if record["kind"] == "train"]
    validated = [record for record in records if record["kind"] == "validation"]
    seconds = sum(record["step_time"] for record in trained)
    last = validated[-1]
    summary = {
        "run": run.path.name,
        **run.read(run.path / "result.json"),
        "train_loss": trained[-1]["loss"],
        "validation_loss": last["loss"],
        "validation_bits_per_token": last["loss"] / math.log(2),
        "unigram_entropy_bits": reference["validation"]["unigram_entropy_bits"],
        "bits_per_byte": last["bits_per_byte"],
        "best_validation_loss": min(record["loss"] for record in validated),
        "tokens": trained[-1]["tokens"],
        "seconds": seconds,
        "tokens_per_second": trained[-1]["tokens"] / seconds,
        "attempts": len(attempts(run)),
        "checkpoint": str(checkpoints.checkpoint_path(run.checkpoints, config["train"]["max_steps"])),
    }
    summary["paths"] = {
        "run": str(run.path),
        "tensorboard": str(run.path / "tensorboard"),
        **write_report(run.path, summary),
    }
    write_atomic(run.summary, json.dumps(summary, indent=1))
    return summary
