"""The units of a plan on the machines of a Dask or Ray cluster; this process writes the journal."""

import os
import shutil
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokens.journal import Journal, JournalEntry, entry_of
from infini_llama.tasks.preprocess.tokens.plan import Plan, Unit, shares_of
from infini_llama.tasks.preprocess.workers.clusters import open_cluster

SHARE = (
    8  # units at most that one worker does on end: more read on in the same files, fewer are done again after a loss
)
SHARES_EACH = 4  # for each of the workers at least, that they end together

Work = Callable[[Plan, list[Unit], Path, Path, Callable[[str, str, int, int], None]], None]


@dataclass(frozen=True)
class Share:
    """What one worker does: units, in the folder of the build."""

    units: list[Unit]
    work: Path

    def __str__(self) -> str:
        return f"the shards {self.units[0].file} to {self.units[-1].file}"


def do_share(shared: tuple[Work, Plan], share: Share) -> list[JournalEntry]:
    """On the worker: writes the shards of a share and returns their journal entries."""
    do, plan = shared
    own = parts_of(share.work) / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    entries: list[JournalEntry] = []

    def finish(name: str, key: str, documents: int, tokens: int) -> None:
        entries.append(entry_of(own / name, name, key, documents, tokens))
        (share.work / name).parent.mkdir(exist_ok=True)
        (own / name).replace(share.work / name)

    try:
        do(plan, share.units, share.work, own, finish)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return entries


def parts_of(work: Path) -> Path:
    """Where workers of a cluster write, beside the build's folder: what a killed one leaves is no part of the artifact."""
    return work.with_name(f"{work.name}-parts")


def do_on_cluster(
    do: Work, plan: Plan, units: list[Unit], journal: Journal, data: DataConfig, log_progress: Callable[[], None]
) -> None:
    """Writes the shard of every unit by the engine `data.engine`, noting each in the journal as it is reported.

    Raises:
        ConfigError: the engine is not installed, or its cluster does not answer.
        PipelineError: a share killed one worker after another; what is done is kept.
    """
    shutil.rmtree(parts_of(journal.work), ignore_errors=True)
    most = max(1, min(SHARE, len(units) // (SHARES_EACH * data.num_workers)))
    shares = [Share(some, journal.work) for some in shares_of(units, most)]
    try:
        with open_cluster(data) as cluster:
            for _, entries in cluster.run(do_share, (do, plan), shares, journal.work / "tokenizer.json"):
                for entry in entries:
                    journal.append(entry)
                log_progress()
    finally:
        shutil.rmtree(parts_of(journal.work), ignore_errors=True)
