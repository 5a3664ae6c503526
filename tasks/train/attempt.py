"""One attempt: from the choice of a checkpoint, through one torchrun, to its outcome on record."""

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from infini_llama.configs.errors import ConfigError, Preempted, no_space
from infini_llama.configs.secrets import masked, without_secrets
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.outcome import Outcome, classify
from infini_llama.tasks.runs.run_folder import (
    AttemptLine,
    RunFolder,
    append_attempt,
    attempt_folders,
    attempts,
    cut_metrics,
    lacking_steps,
    number_of,
    remove_staging,
)
from infini_llama.tasks.runs.signals import ONE_REQUEST_SECONDS
from infini_llama.tasks.runs.status import read_statuses
from infini_llama.tasks.storage.artifacts import Busy, Lock, write_atomic
from infini_llama.tasks.storage.json_lines import unreadable
from infini_llama.tasks.storage.lease import this_machine
from infini_llama.tasks.train.grace import grace_period, tell_orchestrator
from infini_llama.tasks.train.launcher import HUNG, Launched, Launcher
from infini_llama.tasks.train.lineage import weights_of
from infini_llama.tasks.train.progress import Progress
from infini_llama.tasks.train.supervisor import Hung, Watch

log = logging.getLogger("infini_llama.train")
POLL_SECONDS = 0.2
# Kept free in the attempt's folder for the record of its end, which a full disk would refuse.
RESERVE, RESERVE_BYTES = "reserve", 2**16


def new_invocation() -> str:
    """Tells the attempts of one command, with all its retries, from those of others."""
    return f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"


def attempt(
    run: RunFolder,
    launcher: Launcher,
    locks: list[Lock],
    config: dict,
    model: dict,
    reference: dict,
    plan: dict,
    invocation: str,
    each_poll: Callable[[], None],
) -> Outcome:
    """One torchrun, from the checkpoint that `runtime.resume` names to its end.

    Args:
        locks: the run's, and those of its GPUs; torchrun holds them as long as it lives.
        invocation: as `stage.train` takes it.
        each_poll: as `stage.train` takes it; a Busy that it raises ends the workers at once.

    Raises:
        Preempted: this process was asked to stop, and the workers with it.
        Exception: what watching the workers met; they have ended, and it is on record as a failure.
    """
    running = running_job(run, launcher)
    if running:
        attempt_dir, launched = running
        log.info("the workers of %s outlived the command that started them; watching them", attempt_dir.name)
    else:
        grace = grace_period(run, config["runtime"])
        attempt_dir = prepare(run, config, model, reference, plan, invocation, grace)
        try:
            launched = launcher.start(attempt_dir, plan, grace, [lock.fd for lock in locks])
        except ConfigError as refused:  # by the cluster; after other faults a job may be there all the same
            record_attempt(run, attempt_dir, invocation, Outcome("failed", refused.exit_code, str(refused)))
            raise
    order = run.read(attempt_dir / "order.json")
    processes = order["plan"]["nproc_per_node"] * order["plan"]["nnodes"]
    code, interrupted, hang = supervise(launched, run, attempt_dir, config, processes, each_poll)
    statuses = read_statuses(attempt_dir, processes)
    outcome = Outcome("failed", 76, hang) if hang else classify(code, statuses, str(attempt_dir))
    if refused := launched.refusal():
        outcome = Outcome("failed", refused.exit_code, str(refused))
    fault = interrupted if isinstance(interrupted, Exception) and outcome.kind != "done" else None
    if fault is not None:
        outcome = Outcome("failed", 70, f"watching the workers failed: {fault!r}", outcome.step)
    step = record_attempt(run, attempt_dir, invocation, outcome)
    if fault is not None:
        raise fault
    if interrupted is not None and outcome.kind != "done":
        raise Preempted(
            f"run {run.path.name} was stopped; the newest checkpoint is at step {step}. Run the same command to carry on."
        ) from interrupted
    if (why := launched.cancelled()) and outcome.kind != "done":
        raise Preempted(f"{why}; the newest checkpoint is at step {step}. Run the same command to carry on.")
    if outcome.kind == "done" and order["config"]["train"]["max_steps"] != config["train"]["max_steps"]:
        return Outcome("preempted", 75, "finished as the command before this one had told them", outcome.step)
    return outcome


def record_attempt(run: RunFolder, attempt_dir: Path, invocation: str, outcome: Outcome) -> int:
    """Adds the end of an attempt to attempts.jsonl; returns the step of the newest checkpoint."""
    order = run.read(attempt_dir / "order.json")  # as it is now: a job that started again has renewed it
    step = checkpoints.latest_step(run.checkpoints)
    record = {"attempt": number_of(attempt_dir), "invocation": invocation, "from_step": order["from_step"]}
    record |= {"checkpoint_step": step, "seconds": time.time() - order["began"]["wall"]}
    ending = {"kind": outcome.kind, "code": outcome.code, "message": outcome.message, "step": outcome.step}
    known = ("type", "phase", "sample_rows", "memory")
    error = {"error": {name: outcome.details[name] for name in known}} if "phase" in outcome.details else {}
    reserve = attempt_dir / RESERVE
    try:
        append_attempt(run, record | ending | error)
    except OSError as full:
        if not no_space(full):
            raise
        reserve.unlink(missing_ok=True)
        append_attempt(run, record | ending | error)
    reserve.unlink(missing_ok=True)
    return step


def running_job(run: RunFolder, launcher: Launcher) -> tuple[Path, Launched] | None:
    """The newest attempt and its workers, where an earlier command left it to a job of a cluster and nobody saw its end."""
    folders = attempt_folders(run)
    if not folders or number_of(folders[-1]) in {record["attempt"] for record in attempts(run)}:
        return None
    launched = launcher.attach(folders[-1])
    return (folders[-1], launched) if launched else None


def prepare(
    run: RunFolder, config: dict, model: dict, reference: dict, plan: dict, invocation: str, grace: float
) -> Path:
    """The folder of a new attempt, with its order."""
    remove_staging(run)
    chosen, first_step = choose_checkpoint(run, config["runtime"]["resume"], invocation, model, plan)
    number = account_for_killed(run) + 1
    cut_metrics(run, first_step)
    if lacking := lacking_steps(run, first_step):
        log.warning(
            "%s has no line for %d of the steps up to the checkpoint's %d (the first is step %d): curves and sums of the run lack them.",
            run.metrics,
            len(lacking),
            first_step,
            lacking[0],
        )
    attempt_dir = run.path / "logs" / f"attempt-{number:02d}"
    attempt_dir.mkdir(parents=True)
    began = {"wall": time.time(), "monotonic": time.monotonic(), "machine": this_machine()}
    spent = goodput(run, first_step, began["wall"])
    timing = {"began": began, "spent": spent, "from_step": first_step, "grace_period": grace}
    try:
        write_order(attempt_dir, run, config, model, reference, plan, chosen, timing)
        (attempt_dir / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))  # not zeros, which some filesystems do not store
    except OSError:
        shutil.rmtree(attempt_dir, ignore_errors=True)  # nothing was started, so there is no attempt to record
        raise
    source, processes = f"from {chosen.name}" if chosen else "from step 0", plan["nproc_per_node"] * plan["nnodes"]
    log.info("attempt %d starts %s with %d worker(s)", number, source, processes)
    return attempt_dir


def supervise(
    launched: Launched, run: RunFolder, attempt_dir: Path, config: dict, processes: int, each_poll: Callable[[], None]
) -> tuple[int, BaseException | None, str | None]:
    """Watches the workers to their end, and leaves no rank behind.

    Returns:
        the exit code; what asked this process to stop (Ctrl-C, SIGTERM, Prefect's cancellation: no Exception) or what went wrong
        here (an Exception), if anything did; which rank hung, if one did.
    """
    interrupted, hang, let_go = None, None, False
    try:
        watch(launched, run, attempt_dir, config, processes, each_poll)
    except Hung as hung:
        hang = f"{hung}; the stacks of all ranks are in {attempt_dir}"
    except Busy:  # somebody else has the run: watches its job, or writes what workers of this machine would still write
        let_go = launched.detached
        raise
    except BaseException as raised:
        if isinstance(raised, Exception):
            log.error("watching the workers failed (%r); they save and end", raised)
        stop(launched, run, config["runtime"])
        interrupted = raised
    finally:
        if not let_go:
            launched.end()
    if (path := attempt_dir / HUNG).exists():
        hang = f"{path.read_text(encoding='utf-8')}; the stacks of all ranks are in {attempt_dir}"
    code = launched.poll()
    assert code is not None  # it has ended
    return code, interrupted, hang


def watch(
    launched: Launched, run: RunFolder, attempt_dir: Path, config: dict, processes: int, each_poll: Callable[[], None]
) -> None:
    """Waits for the end, telling progress and calling `each_poll` a few times a second; raises Hung where a rank does not move."""
    progress = Progress(run, config["train"]["max_steps"], config["train"]["log_every"])
    nodes_meet = config["environment"]["nnodes"] > 1
    ranks = Watch(attempt_dir, processes, config["runtime"]["hang_after"], launched.heartbeats, nodes_meet=nodes_meet)
    notices: list[str] = []
    ended = False
    while not ended:
        ended = launched.poll() is not None
        with suppress(OSError):  # the filesystem does not answer just now
            progress.poll()
        if (newest := launched.notices()) != notices:
            notices = newest
            for line in notices:
                log.warning(line)
        try:
            if not launched.detached:  # else its own supervisor does that, beside the ranks
                ranks.poll()
        except Hung:
            ranks.dump_stacks()
            raise
        each_poll()
        if not ended:
            time.sleep(POLL_SECONDS)


def stop(launched: Launched, run: RunFolder, runtime: dict) -> None:
    """Lets the workers save and end within the grace period; another request meanwhile ends them at once (by the caller).

    What interrupts this within a second is the same request: Prefect and Ctrl-C have signal handlers of their own, which tell it
    as often as it comes.
    """
    asked = time.monotonic()
    while True:
        try:
            return ask(launched, run, runtime)
        except Exception:
            raise
        except BaseException:
            if time.monotonic() - asked > ONE_REQUEST_SECONDS:
                log.warning("asked again; ending at once, with the newest checkpoint that is whole")
                return


def ask(launched: Launched, run: RunFolder, runtime: dict) -> None:
    try:
        grace = grace_period(run, runtime)
    except ConfigError as refused:  # measured meanwhile: all the time there is
        log.warning("%s", refused)
        grace = runtime["orchestrator_grace"]
    except (OSError, ValueError):  # metrics.jsonl cannot be read just now
        grace = runtime["grace_period"]
    log.warning("asked to stop; waiting up to %.0f s for a checkpoint (asked again: not waiting)", grace)
    tell_orchestrator(grace)
    launched.stop(grace)


def choose_checkpoint(run: RunFolder, resume: str, invocation: str, model: dict, plan: dict) -> tuple[Path | None, int]:
    """The checkpoint to start from and its step, None and 0 for a fresh start.

    A rule other than auto holds for the first attempt of a command; a path until the run has a checkpoint of its own since.
    """
    lineage = run.read_lineage()
    tried = any(record.get("invocation") == invocation for record in attempts(run))
    if resume in ("must", "never", "best") and tried:
        resume = "auto"
    chosen = checkpoints.choose(run.checkpoints, resume, lineage.get("resumed_from"))
    first_step = refuse_other_model(chosen, model, plan) if chosen else 0
    if resume not in ("auto", "must", "never", "best"):
        write_atomic(run.lineage, json.dumps(lineage | {"resumed_from": resume}, indent=1))
    return chosen, first_step


def write_order(
    attempt_dir: Path,
    run: RunFolder,
    config: dict,
    model: dict,
    reference: dict,
    plan: dict,
    chosen: Path | None,
    timing: dict,
) -> None:
    """order.json: everything that the workers of this attempt are told."""
    lineage = run.read_lineage()
    train = config["train"]
    smaller = min(train["micro_batch_size"], lineage.get("micro_batch_size", train["micro_batch_size"]))
    order = timing | {
        "lineage": lineage,  # a copy, should the file be damaged
        "run_dir": str(run.path),
        "dataset": str(Path(config["runtime"]["home"]).resolve() / reference["path"]),
        "dataset_digest": reference["digest"],
        "chunks": reference["chunks"],
        "sequence_length": reference["sequence_length"],
        "weights": weights_of(config["data"]),
        "verify_on_read": reference.get("verify_on_read", False),
        "resume_from": str(chosen) if chosen else None,
        "init_from": None if chosen else (lineage.get("init_from") or {}).get("path"),
        "left_out": lineage.get("left_out", []),
        "config": without_secrets(config) | {"train": train | {"micro_batch_size": smaller}},
        "model": model,
        "plan": plan | {"env": masked(plan["env"])},  # the workers have the real ones in their environment
    }
    write_atomic(attempt_dir / "order.json", json.dumps(order, indent=1))


def refuse_other_model(chosen: Path, model: dict, plan: dict) -> int:
    """Step of the checkpoint, once it is known to be of this architecture."""
    state, workers = checkpoints.read_state(chosen), plan["nproc_per_node"] * plan["nnodes"]
    there = state.model
    if differing := [key for key in there if key in model and there[key] != model[key]]:
        lines = [f"model.{key}: {there[key]} there, {model[key]} here" for key in differing]
        raise ConfigError(f"checkpoint {chosen} is of another architecture:\n  " + "\n  ".join(lines))
    if state.world_size != workers:
        log.warning(
            "the checkpoint was written by %d worker(s) and %d carry on: the same samples in the same order, but sums are rounded "
            "differently, so the run is no longer bitwise the uninterrupted one.",
            state.world_size,
            workers,
        )
    return state.step


def account_for_killed(run: RunFolder) -> int:
    """Number of the newest attempt. One that left a folder but no record was killed together with the command that watched it.

    A record without a folder is one whose logs were removed, or not brought along to this machine.
    """
    begun = set(map(number_of, attempt_folders(run)))
    recorded = {record["attempt"] for record in attempts(run)}
    message = "the command was killed"
    if fault := unreadable(run.attempts, AttemptLine):
        log.warning("%s; what stands there is left out.", fault)
        message = "the command was killed, or the line of its end cannot be read"
    for missing in sorted(begun - recorded):
        append_attempt(run, {"attempt": missing, "invocation": None, "kind": "failed", "code": 70, "message": message})
    return max(begun | recorded, default=0)
