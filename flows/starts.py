"""A start of a run, and the name that is filled in for it.

A name with {date} or {time} belongs to one start. The ID of a start is that of its flow run. In a
Slurm job, it is that of the job, which a requeue keeps, and a digest of the settings.
`<home>/starts/<ID>.json` has the name, so that a retry, a resume and a requeue continue the run,
also on another machine that has the mirror. A command without such an ID is a new start each time.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from infini_llama.configs.reading import changed
from infini_llama.configs.schedulers import number_in
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows.naming import config_of_run, has_time
from infini_llama.tasks.runs.mirror import is_mirrored, restore_start
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.start_records import (
    StartRecord,
    read_start,
    start_file,
    start_records,
)
from infini_llama.tasks.storage.filesystem import require_folder
from infini_llama.tasks.storage.record_files import write_record

log = logging.getLogger("infini_llama.run")


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

    def claim(self, written: PipelineConfig, *, is_dry: bool = False) -> PipelineConfig:
        """The configuration of this start's run, whose folder no other start has.

        Args:
            is_dry: nothing is written, so that another start may take the name.

        Raises:
            ConfigError: a setting, or the home folder, cannot be used.
            PipelineError: the mirror cannot be read.
        """
        config = config_of_run(written, self.due)
        if not has_time(written.runtime.name):
            return config
        home = config.runtime.home
        if is_dry:
            stored = self._stored(config)
            return with_name(
                config, stored.name if stored else next(_free_names(config))
            )
        require_folder(home)
        if self.id:
            restore_start(config, start_file(home, self.id))
        stored = self._stored(config)
        if stored is None:
            self._warn_of_other_settings(home)
            name = self._make_folder(config)
        else:
            name = stored.name
            log.info("this start continues run %s", name)
            self._write(home, name)
        return with_name(config, name)

    def _stored(self, config: PipelineConfig) -> StartRecord | None:
        """The record of this start; None if it has no name yet.

        A Slurm job may execute one command several times. If its run is finished, the next
        execution is a new start, unless the job was requeued in between.
        """
        home = config.runtime.home
        stored = read_start(start_file(home, self.id)) if self.id else None
        if stored is None:
            return None
        is_same_execution = bool(self.job) and self.requeues <= stored.requeues
        if is_same_execution and RunFolder(home / "runs" / stored.name).result.exists():
            return None
        return stored

    def _make_folder(self, config: PipelineConfig) -> str:
        """Create the folder of a new run, and return its name.

        The record is written before: a start that is killed in between already has the name, and
        no other start takes it.
        """
        home = config.runtime.home
        runs = home / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            name = next(_free_names(config))
            self._write(home, name)
            with contextlib.suppress(FileExistsError):  # another start was faster
                (runs / name).mkdir()
                break
        first = config.runtime.name
        if name != first:
            log.warning(
                "run %s belongs to another start; this one is %s. To continue the other, set "
                "runtime.name=%s.",
                first,
                name,
                first,
            )
        return name

    def _write(self, home: Path, name: str) -> None:
        """Write the record of this start, unless nothing executes it again."""
        if not self.id:
            return
        file = start_file(home, self.id)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_record(file, StartRecord(name=name, requeues=self.requeues))

    def _warn_of_other_settings(self, home: Path) -> None:
        """Warn if a requeued job leaves a run that it began with other settings."""
        if not self.requeues:
            return
        for other in start_records(home, f"{self.job}-").values():
            is_finished = RunFolder(home / "runs" / other.name).result.exists()
            if other.requeues < self.requeues and not is_finished:
                log.warning(
                    "the settings are not those of run %s, which this job began before it was "
                    "requeued; a new run begins. To continue the other, set runtime.name=%s.",
                    other.name,
                    other.name,
                )


def start_of_command(
    config: PipelineConfig, variables: Mapping[str, str] = os.environ
) -> Start:
    """The start that a command executes: that of its Slurm job, otherwise a new one.

    Different commands of a job are different starts, so the ID contains a digest of the settings.

    Raises:
        ConfigError: the count of the job's requeues is not a number.
    """
    number = variables.get("SLURM_JOB_ID")
    if not number:
        return Start()
    cluster = variables.get("SLURM_CLUSTER_NAME") or "slurm"
    job = f"{cluster}-{number}".replace("/", "_")
    settings = config.model_dump(mode="json", exclude={"deployment"})
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[
        :12
    ]
    requeues = number_in(variables, ("SLURM_RESTART_COUNT",)) or 0
    return Start(f"{job}-{digest}", job, requeues)


def _free_names(config: PipelineConfig) -> Iterator[str]:
    """The run's name, then with -2, -3 and so on, without those of starts and of runs.

    A start has its name before it makes the folder. A run may be here or in the mirror.
    """
    first = config.runtime.name
    home = config.runtime.home
    of_starts = {start.name for start in start_records(home).values()}
    for number in count(1):
        name = first if number == 1 else f"{first}-{number}"
        if name in of_starts or os.path.lexists(home / "runs" / name):
            continue
        if not is_mirrored(with_name(config, name)):
            yield name


def with_name(config: PipelineConfig, name: str) -> PipelineConfig:
    """The configuration with another runtime.name."""
    return changed(config, runtime=changed(config.runtime, name=name))
