"""Before a job's workers start: whether the attempt is still this job's, and where a job that starts again takes up.

    python -m infini_llama.tasks.clusters.restart ATTEMPT_DIR JOB

A cluster puts a job back into the queue when its node fails, when another job needs its place, or when its time is up. It then
starts again without anybody watching, so it renews what its workers are given to the newest checkpoint.
"""

import logging
import os
import sys
import time
from pathlib import Path

from infini_llama.tasks.clusters.node_records import OVER
from infini_llama.tasks.clusters.slurm import ENDED
from infini_llama.tasks.records.goodput import StartTime
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.job_file import read_job, write_job
from infini_llama.tasks.runs.run_folder import RunFolder, attempt_folders, cut_metrics, remove_staging
from infini_llama.tasks.storage.lease import this_machine
from infini_llama.tasks.train.launcher import HUNG

STARTED = "job-started"  # holds the number of the job that has taken the attempt
log = logging.getLogger("infini_llama.train")


def prepare(attempt_dir: Path, job: str) -> str | None:
    """Takes the attempt for this job, and renews what its workers are given where it has run before.

    Returns:
        why the job must not start, None where it may.
    """
    if refused := superseded(attempt_dir):
        return refused
    path = attempt_dir / STARTED
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w", encoding="utf-8") as file:
            file.write(job)
        return None
    except FileExistsError:
        owner = path.read_text(encoding="utf-8")
    if owner != job:
        return f"{attempt_dir.name} is job {owner}'s; this is job {job}."
    renew(attempt_dir)
    return None


def superseded(attempt_dir: Path) -> str | None:
    """Why the attempt must not run, where the run has given it up for a later one."""
    newest = attempt_folders(RunFolder(attempt_dir.parents[1]))[-1]
    if newest == attempt_dir:
        return None
    return f"the run is at {newest.name} already; this job of {attempt_dir.name} has come too late."


def renew(attempt_dir: Path) -> None:
    """Start from the newest valid checkpoint; move aside what the ranks and the nodes of the start before have written."""
    run = RunFolder(attempt_dir.parents[1])
    job = read_job(attempt_dir)
    remove_staging(run)
    chosen = checkpoints.newest_good(run.checkpoints)
    step = checkpoints.read_state(chosen).step if chosen else job.from_step
    cut_metrics(run, step)
    aside = attempt_dir / f"start-{sum(1 for _ in attempt_dir.glob('start-*')) + 1}"
    aside.mkdir()
    for pattern in ("status-*.json", "heartbeat-*", "beats-*.json", "node-*.json", OVER, HUNG, ENDED):
        for file in attempt_dir.glob(pattern):
            file.rename(aside / file.name)
    started = StartTime(wall=time.time(), monotonic=time.monotonic(), machine=this_machine())
    changed = {"resume_from": chosen, "init_from": None} if chosen else {}
    write_job(attempt_dir, job.model_copy(update=changed | {"from_step": step, "started": started}))
    log.info("the job restarts, from %s", chosen.name if chosen else "the beginning")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    refused = prepare(Path(sys.argv[1]), sys.argv[2])
    if refused:
        log.error("%s", refused)
    return 70 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
