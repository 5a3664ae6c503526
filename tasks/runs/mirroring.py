"""Keeps a run and its dataset in the mirror while it trains, and brings both back to a machine that has neither."""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.records.dataset import DatasetPlan, DatasetRef
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.checkpoints import KIND
from infini_llama.tasks.storage.mirror import Mirror

log = logging.getLogger("infini_llama.mirror")
LOOK_EVERY = 1.0  # seconds
# What a run is beside its checkpoints. The metrics may be ahead of a checkpoint, never behind: they are cut when it is resumed.
# The lineage comes back last: where it is, everything is.
RECORDS = (
    "config.yaml",
    "environment.json",
    "compile.json",
    "attempts.jsonl",
    "metrics.jsonl",
    "samples.jsonl",
    "wandb.json",
    "result.json",
    "summary.json",
    "evaluations.jsonl",
    "lineage.json",
)


def restore_dataset(config: PipelineConfig, plan: Callable[[], DatasetPlan]) -> None:
    """Fetches the planned dataset where the mirror has it and home has not. `plan` may read the text; without a mirror it is not called."""
    if (mirror := _mirror(config)) is None:
        return
    planned = plan()
    folder = mirror.home / "datasets" / planned.name
    if not folder.exists():
        mirror.restore(folder, "dataset")
    for table in planned.row_tables:
        chunks = folder / "chunks" / table.chunks
        if folder.exists() and not chunks.exists():
            mirror.restore(chunks, "chunks")


def restore_run(config: PipelineConfig) -> None:
    """Fetches the run's records and its newest whole checkpoint where home knows nothing of the run."""
    if (mirror := _mirror(config)) is None:
        return
    run = mirror.home / "runs" / config.runtime.name
    if (run / "lineage.json").exists():
        if ahead := _of_another(mirror, run):
            log.warning(
                "the mirror has step %d of run %s, but this machine continues from step %d; to use the mirror's "
                "copy, move %s away. Nothing is copied to the mirror until this machine has passed that step.",
                checkpoints.step_of(ahead),
                run.name,
                checkpoints.latest_step(run / "checkpoints"),
                run,
            )
        return
    for path in reversed(mirror.kept(run / "checkpoints")):
        if mirror.restore(path, KIND):
            for name in RECORDS:
                mirror.restore_file(run / name)
            return


@contextmanager
def mirrored(config: PipelineConfig, reference: DatasetRef) -> Generator[None]:
    """Inside, what is committed is copied in the background; leaving waits for the last copy.

    A mirror that does not answer never stops training: it is said, and tried again with the next checkpoint.
    """
    if (mirror := _mirror(config)) is None:
        yield
        return
    dataset = mirror.home / reference.path
    tables = [(dataset / "chunks" / table.chunks, "chunks") for table in reference.row_tables]
    artifacts = [(dataset, "dataset"), *tables]
    run, over = mirror.home / "runs" / config.runtime.name, threading.Event()

    def copy() -> None:
        while True:
            last = over.is_set()
            try:
                for path, kind in artifacts:
                    _keep(mirror, run, path, kind)
                if not _of_another(mirror, run):
                    for checkpoint in reversed(checkpoints.committed(run / "checkpoints")):
                        _keep(mirror, run, checkpoint.path, KIND)
                    if last:
                        _records(mirror, run)
                    _delete_pruned(mirror, run)
            except Exception as fault:  # of any filesystem's making
                log.warning("storage.mirror=%s: %s; it will be retried", mirror.url, fault)
            if last:
                return
            over.wait(LOOK_EVERY)

    thread = threading.Thread(target=copy, name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _keep(mirror: Mirror, run: Path, path: Path, kind: str) -> None:
    if not path.exists() or mirror.has(path):  # a checkpoint may have been pruned since
        return
    if kind == KIND:
        _records(mirror, run)
    if sent := mirror.keep(path, kind):
        log.info("%s was copied to %s (%.1f MB)", path.name, mirror.url, sent / 1e6)


def _records(mirror: Mirror, run: Path) -> None:
    for name in RECORDS:
        if (run / name).exists():
            mirror.keep_file(run / name)


def _of_another(mirror: Mirror, run: Path) -> Path | None:
    """The newest copy of a later step that this folder never had: another machine took the run further, and its copy is left whole."""
    here = checkpoints.latest_step(run / "checkpoints")
    ahead = [path for path in mirror.kept(run / "checkpoints") if checkpoints.step_of(path) > here]
    return next((path for path in reversed(ahead) if not _abandoned(mirror, path)), None)


def _delete_pruned(mirror: Mirror, run: Path) -> None:
    """Follows the pruning of this run's checkpoints, and its going back to an older one."""
    here = [checkpoint.path for checkpoint in checkpoints.committed(run / "checkpoints")]
    newest = checkpoints.step_of(here[0]) if here else 0
    for path in mirror.kept(run / "checkpoints"):
        if path not in here and (checkpoints.step_of(path) < newest or _abandoned(mirror, path)):
            mirror.delete(path)


def _abandoned(mirror: Mirror, path: Path) -> bool:
    """Whether the copy of this checkpoint is of one that this run has gone back from."""
    return any(mirror.has(path, of=folder) for folder in (path.parent / "abandoned").glob(f"{path.name}*"))


def _mirror(config: PipelineConfig) -> Mirror | None:
    url = config.storage.mirror
    return Mirror(url, config.runtime.home) if url else None
