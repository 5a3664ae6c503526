"""A start of a run, and the name that is filled in for it.

A name with {date} or {time} belongs to one start. The start is known by the ID of its flow run, or
of its Slurm job, which a requeue keeps. `<home>/starts/<ID>` has the name, so that a retry, a
resume and a requeue continue the run. A command without such an ID is a new start each time.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows.naming import has_time
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.filesystem import require_folder
from infini_llama.tasks.storage.record_files import read_record, write_record

log = logging.getLogger("infini_llama.run")


class StartRecord(Record):
    """The name that was filled in for a start.

    Attributes:
        requeues: how often the job had been requeued when a command last used the name.
    """

    name: str
    requeues: int = 0


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        id: name of the start's file; "" for a start that nothing executes again.
        job: beginning of the IDs of all starts of the Slurm job; "" if there is no job.
        requeues: how often the job has been requeued.
        due: scheduled start in the time zone of {date} and {time}; None: now, of this machine.
    """

    id: str = ""
    job: str = ""
    requeues: int = 0
    due: datetime | None = None

    def preview(self, written: PipelineConfig, resolved: PipelineConfig) -> PipelineConfig:
        """The resolved configuration with the name that `claim` would give it."""
        if not has_time(written.runtime.name):
            return resolved
        home = resolved.runtime.home
        stored = self._stored(home)
        if stored is not None:
            return with_name(resolved, stored.name)
        names = _names(resolved.runtime.name)
        return with_name(
            resolved, next(name for name in names if not (home / "runs" / name).exists())
        )

    def claim(self, written: PipelineConfig, resolved: PipelineConfig) -> PipelineConfig:
        """The resolved configuration with the start's name, whose folder no other start has.

        Args:
            written: the configuration before `config_of_run`.
            resolved: after it; its name is the one to claim.

        Raises:
            ConfigError: the home folder cannot be used.
        """
        if not has_time(written.runtime.name):
            return resolved
        home = resolved.runtime.home
        require_folder(home)
        stored = self._stored(home)
        if stored is None:
            self._warn_of_other_settings(home)
            name = _make_folder(home / "runs", resolved.runtime.name)
        else:
            name = stored.name
            log.info("this start continues run %s", name)
        if self.id:
            (home / "starts").mkdir(parents=True, exist_ok=True)
            write_record(self._file(home), StartRecord(name=name, requeues=self.requeues))
        return with_name(resolved, name)

    def _file(self, home: Path) -> Path:
        return home / "starts" / f"{self.id}.json"

    def _stored(self, home: Path) -> StartRecord | None:
        """The record of this start; None if it has no name yet.

        A Slurm job may execute one command several times. If its run is finished, the next
        execution is a new start, unless the job was requeued in between.
        """
        stored = _read(self._file(home)) if self.id else None
        if stored is None:
            return None
        is_same_execution = bool(self.job) and self.requeues <= stored.requeues
        if is_same_execution and RunFolder(home / "runs" / stored.name).result.exists():
            return None
        return stored

    def _warn_of_other_settings(self, home: Path) -> None:
        """Warn if a requeued job leaves a run that it began with other settings."""
        if not self.requeues:
            return
        for file in sorted((home / "starts").glob(f"{self.job}-*.json")):
            other = _read(file)
            if other is None or other.requeues >= self.requeues:
                continue
            if not RunFolder(home / "runs" / other.name).result.exists():
                log.warning(
                    "the settings are not those of run %s, which this job began before it was "
                    "requeued; a new run begins. To continue the other, set runtime.name=%s.",
                    other.name,
                    other.name,
                )


def start_of_command(config: PipelineConfig, variables: Mapping[str, str] = os.environ) -> Start:
    """The start that a command executes: that of its Slurm job, otherwise a new one.

    Different commands of a job are different starts, so the ID contains a digest of the settings.

    Raises:
        ConfigError: SLURM_RESTART_COUNT is not a number.
    """
    number = variables.get("SLURM_JOB_ID")
    if not number:
        return Start()
    requeues = variables.get("SLURM_RESTART_COUNT") or "0"
    if not requeues.isdecimal():
        raise ConfigError(f"SLURM_RESTART_COUNT={requeues} is not a number; Slurm sets it.")
    cluster = variables.get("SLURM_CLUSTER_NAME") or "slurm"
    job = f"{cluster}-{number}".replace("/", "_")
    settings = config.model_dump(mode="json", exclude={"deployment"})
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return Start(f"{job}-{digest}", job, int(requeues))


def _read(file: Path) -> StartRecord | None:
    if not file.exists():
        return None
    try:
        return read_record(StartRecord, file)
    except Damaged as fault:
        log.warning("%s It is not used, and the start gets a new name.", fault)
        return None


def _names(name: str) -> Iterator[str]:
    """`name`, then `name-2`, `name-3` and so on."""
    yield name
    for number in count(2):
        yield f"{name}-{number}"


def _make_folder(runs: Path, name: str) -> str:
    """Create the folder of a new run, and return its name."""
    runs.mkdir(parents=True, exist_ok=True)
    for free in _names(name):
        try:
            (runs / free).mkdir()
        except FileExistsError:
            continue
        if free != name:
            log.warning(
                "run %s belongs to another start; this one is %s. To continue the other, set "
                "runtime.name=%s.",
                name,
                free,
                name,
            )
        return free
    raise AssertionError("unreachable: the names do not end")


def with_name(config: PipelineConfig, name: str) -> PipelineConfig:
    """The configuration with another runtime.name."""
    return changed(config, runtime=changed(config.runtime, name=name))
