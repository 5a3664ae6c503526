"""The folder of a run: its files, their records, and the lines that a run appends to."""

import json
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import yaml
from blake3 import blake3
from pydantic import JsonValue

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.metrics import (
    METRICS_LINE,
    MetricsLine,
    SampleLine,
    StepLine,
    TrainLine,
)
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.storage.artifacts import Damaged, readable
from infini_llama.tasks.storage.files import write_atomic
from infini_llama.tasks.storage.record_files import (
    Kind,
    append_line,
    as_record,
    read_fields,
    read_lines,
    scan,
    unreadable_lines,
    write_fields,
)

# A field of each record of a run; the checksums of its lines depend on it.
RUN_ID = "run_id"
NOT_RETRIED = "not-retried"  # in an attempt's folder
RecordType = TypeVar("RecordType", bound=Record)
AnyStep = TypeVar("AnyStep", bound=StepLine)
log = logging.getLogger("infini_llama.train")


class RunFolder:
    """The folder of a run, and the paths of what is in it.

    Attributes:
        records: files beside the checkpoints without which a run cannot go on or be reported on;
            the lineage is last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.config = path / "config.yaml"
        self.lineage = path / "lineage.json"
        self.environment = path / "environment.json"
        self.compile = path / "compile.json"
        self.wandb = path / "wandb.json"
        self.attempts = path / "attempts.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.result = path / "result.json"
        self.summary = path / "summary.json"
        self.loss_curve = path / "loss.png"
        self.report = path / "report.html"
        self.lock = path / "lock"
        self.export_lock = path / "export.lock"
        self.lease = path / "lease"
        self.records = (
            self.config,
            self.environment,
            self.compile,
            self.wandb,
            self.attempts,
            self.metrics,
            self.samples,
            self.evaluations,
            self.result,
            self.summary,
            self.lineage,
        )

    @classmethod
    def of(cls, runtime: RuntimeConfig) -> "RunFolder":
        """The folder of the run that a configuration names."""
        return cls(runtime.home.resolve() / "runs" / runtime.name)

    def read_id(self) -> str:
        """The run's id: that of lineage.json, unless other records agree on another one.

        It is "" before the first. Reads three files.
        """
        plans = [
            path
            for path in map(attempt_plan_path, attempt_folders(self))
            if path.exists()
        ]
        in_lineage = _id_in(self.lineage)
        others = [_id_in(path) for path in (*plans[-1:], self.environment)]
        others = [other for other in others if other]
        return in_lineage if in_lineage in others or not others else others[0]

    def dataset(self, path: str) -> Path:
        """The folder of a dataset whose path is relative to the run's home.

        That is the home in which the run's folder lies by its name, also as a link; or, if that has
        no such dataset, since the folder was moved and is named by its new place, the home that its
        config.yaml names.
        """
        homes = [self.path.absolute().parent.parent]
        with suppress(Damaged):
            runtime = (self.read_config() or {}).get("runtime")
            home = runtime.get("home") if isinstance(runtime, dict) else None
            if isinstance(home, str):
                homes.append(Path(home))
        folders = [home / path for home in homes]
        return next((folder for folder in folders if folder.is_dir()), folders[0])

    def read(
        self,
        kind: type[RecordType],
        path: Path,
        run_id: str = "",
    ) -> RecordType:
        """The record in a file of this folder; one without an id may be of any run.

        Args:
            run_id: of `read_id`, which goes through all attempts; "": it is read.

        Raises:
            Damaged: there is none, it is not as it was written, or it is of another run.
        """
        fields = read_fields(path)
        run_id = run_id or self.read_id()
        stored = fields.get(RUN_ID, run_id)
        if run_id and stored != run_id:
            raise Damaged(
                f"{path} belongs to another run: its {RUN_ID} is {stored}, and this run's is "
                f"{run_id}."
            )
        return as_record(kind, fields, path)

    def find(self, kind: type[RecordType], path: Path) -> RecordType | None:
        """The record in a file that training writes again.

        It is the same as `read`, but None without the file, and with a warning where it is damaged.
        """
        try:
            return self.read(kind, path) if os.path.lexists(path) else None
        except Damaged as fault:
            log.warning("%s It is not used; training writes it again.", fault)
            return None

    def write(self, path: Path, record: Record) -> None:
        """Replace a record of this folder."""
        write_fields(
            path, {RUN_ID: self.read_id() or secrets.token_hex(8)} | record.to_json()
        )

    def has_begun(self) -> bool:
        """Whether there is anything of a run, also where its lineage.json was removed."""
        return (
            os.path.lexists(self.lineage)
            or bool(attempt_folders(self))
            or any(self.checkpoints.glob("step-*"))
        )

    def read_lineage(self) -> Lineage | None:
        """lineage.json, None before the first attempt.

        If it is damaged or removed, it is the copy that the newest attempt was given.

        Raises:
            Damaged: there is no such copy, or there are checkpoints without any attempt.
        """
        if not self.has_begun():
            return None
        try:
            return self.read(Lineage, self.lineage)
        except Damaged as fault:
            for attempt_dir in reversed(attempt_folders(self)):
                with suppress(Damaged):
                    copy = read_attempt_plan(attempt_dir).lineage
                    log.warning(
                        "%s The copy in %s is used.",
                        fault,
                        attempt_plan_path(attempt_dir),
                    )
                    return copy
            raise Damaged(
                f"{fault} It records what the run was trained on, and no attempt has a copy. Put "
                "the file back from a backup or a mirror, or choose another runtime.name."
            ) from None

    def require_lineage(self) -> Lineage:
        """lineage.json of a run that has started.

        Raises:
            ConfigError: this is not the folder of a run.
            Damaged: as `read_lineage`.
        """
        lineage = self.read_lineage()
        if lineage is None:
            raise ConfigError(
                f"{self.path} is not a run folder (it has no lineage.json); give the path of "
                "runs/<name> in your home folder."
            )
        return lineage

    def write_config(self, config: JsonObject) -> None:
        """Write config.yaml, for people and for comparisons of runs.

        Its first line has the checksum of the run's id and the other lines.
        """
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        write_atomic(self.config, f"# {_checksum(text, self.read_id())}\n{text}")

    def read_config(self) -> JsonObject | None:
        """config.yaml, None without it.

        A file whose first line is not its checksum is used as it is.

        Raises:
            Damaged: it is not as it was written, or not YAML.
        """
        if not os.path.lexists(self.config):
            return None
        with readable(self.config):
            written = self.config.read_bytes()
        try:
            text = written.decode()
            first, _, rest = text.partition("\n")
            if (
                first.startswith("# blake3:")
                and first != f"# {_checksum(rest, self.read_id())}"
            ):
                raise Damaged(
                    f"{self.config} does not match its own checksum, or is of another run. If you "
                    "changed it on purpose, delete its first line; otherwise it is damaged."
                )
            # through JSON, since YAML has dates and keys that are no text
            config: JsonValue = json.loads(
                json.dumps(yaml.safe_load(text), default=str)
            )
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            raise Damaged(f"{self.config} is not YAML; delete it.") from None
        if not isinstance(config, dict):
            raise Damaged(f"{self.config} is not a configuration; delete it.")
        return config


def run_folders(home: Path) -> list[Path]:
    """The folders in `home/runs`, in the order of their names.

    Raises:
        OSError: it cannot be read, where `glob` would find none.
    """
    runs = home / "runs"
    return (
        sorted(path for path in runs.iterdir() if path.is_dir())
        if runs.is_dir()
        else []
    )


def _id_in(path: Path) -> str:
    with suppress(Damaged):
        stored = read_fields(path).get(RUN_ID) if path.exists() else None
        return stored if isinstance(stored, str) else ""
    return ""


def _checksum(text: str, run: str) -> str:
    return f"blake3:{blake3((run + text).encode()).hexdigest()}"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder.

    Each file counts once whatever links lead to it; what vanishes meanwhile counts nothing.
    """
    if not path.is_dir():
        with suppress(FileNotFoundError):
            return path.stat().st_size
        return 0
    sizes: dict[tuple[int, int], int] = {}
    seen: set[str] = set()
    for root, folders, files in os.walk(path, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            with suppress(FileNotFoundError):
                status = Path(root, name).stat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def remove_staging(run: RunFolder) -> None:
    """Remove what a killed save left half-written; only called under the run's lock."""
    for path in run.checkpoints.glob(".step-*"):
        log.info("removing %s, left by a save that did not finish", path.name)
        shutil.rmtree(path, ignore_errors=True)  # else it stays for `gc`


def cut_metrics(run: RunFolder, step: int, is_evaluation_due: bool) -> None:
    """Cut metrics.jsonl and samples.jsonl back to the checkpoint of `step`.

    The resumed run then neither repeats nor skips a line. Lines that cannot be read are removed,
    with a warning.

    Args:
        is_evaluation_due: of the checkpoint's train state. The evaluation of `step` is made again.
    """
    evaluated = step - 1 if is_evaluation_due else step
    _cut(run.metrics, METRICS_LINE, step, evaluated, run.read_id())
    _cut(run.samples, SampleLine, step, evaluated, run.read_id())


def _cut(
    path: Path, kind: Kind[AnyStep], trained: int, evaluated: int, run: str
) -> None:
    """Keep training up to step `trained` and evaluations up to step `evaluated`."""
    # The lines, not their records, which take several times the memory of the file.
    kept: list[bytes] = []
    bad: list[int] = []
    is_whole = True
    for number, line, record in scan(path, kind, run):
        last = trained if isinstance(record, TrainLine) else evaluated
        if record is not None and record.step <= last:
            kept.append(line)
            continue
        is_whole = False
        if record is None and line.endswith(b"\n"):
            bad.append(number)
    if bad:
        log.warning("%s; removed.", unreadable_lines(path, bad))
    if not is_whole:
        write_atomic(path, b"".join(kept).decode())


def read_metrics(run: RunFolder) -> list[MetricsLine]:
    """Every line of metrics.jsonl that can be read; the next attempt removes the others."""
    return read_lines(run.metrics, METRICS_LINE, run.read_id())


def append_attempt(run: RunFolder, record: AttemptRecord) -> None:
    """Add the end of an attempt to attempts.jsonl."""
    append_line(run.attempts, record, run.read_id())


def read_attempts(run: RunFolder) -> list[AttemptRecord]:
    """Every attempt at this run whose line can be read, oldest first."""
    return read_lines(run.attempts, AttemptRecord, run.read_id())


def attempt_folders(run: RunFolder) -> list[Path]:
    """The folder of every attempt, oldest first.

    They are sorted by number, since the hundredth's name sorts before the ninety-ninth's.
    """
    names = re.compile(r"attempt-[0-9]+")
    folders = [
        path for path in run.logs.glob("attempt-*") if names.fullmatch(path.name)
    ]
    return sorted(folders, key=number_of)


def number_of(attempt_dir: Path) -> int:
    return int(attempt_dir.name.removeprefix("attempt-"))


def mark_not_retried(run: RunFolder) -> None:
    """Mark the newest attempt, for the nodes that join: the command makes no other one."""
    for newest in attempt_folders(run)[-1:]:
        with suppress(OSError):  # they then wait until their time-out
            (newest / NOT_RETRIED).touch()


def is_retried(run: RunFolder) -> bool:
    """Whether the newest attempt, which failed, may be retried."""
    return not any(
        (newest / NOT_RETRIED).exists() for newest in attempt_folders(run)[-1:]
    )


def attempt_plan_path(attempt_dir: Path) -> Path:
    """The file of an attempt with what its workers are given."""
    return attempt_dir / "plan.json"


def read_attempt_plan(attempt_dir: Path, run_id: str = "") -> AttemptPlan:
    """The plan that the workers of an attempt are given.

    Args:
        run_id: see `RunFolder.read`.

    Raises:
        Damaged: there is no such file, or it is not as it was written.
    """
    run = RunFolder(attempt_dir.parents[1])
    return run.read(AttemptPlan, attempt_plan_path(attempt_dir), run_id)


def write_attempt_plan(attempt_dir: Path, attempt: AttemptPlan) -> None:
    """Write what the workers of an attempt are given."""
    RunFolder(attempt_dir.parents[1]).write(attempt_plan_path(attempt_dir), attempt)
