"""The folder of a run: what it remembers, and what it refuses to be mixed with."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import TrainingConfig
from infini_llama.configs.secrets import without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.train.curriculum import last_steps
from infini_llama.tasks.train.initial import refuse_unlike

log = logging.getLogger("infini_llama.train")
# Another value of one of these is another run: the same folder is refused.
FIXED = ("seed", "global_batch_size", "prefer_long_documents")
# These change what is reported or kept, not what is computed.
FREE = (
    "log_every",
    "eval_every",
    "eval_sequences",
    "eval_tokens",
    "report_to",
    "metrics_hook",
    "profile_steps",
    "save_every",
    "save_total_limit",
    "save_permanent_every",
    "async_save",
    "dataloader_num_workers",
    "sample_prompt",
    "sample_prompts",
    "sample_tokens",
    "sample_at_evaluation",
    "repeat_data",  # only refuses
    "init_from",  # by its digest
)


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def lineage(self) -> Path:
        return self.path / "lineage.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def read(self, path: Path) -> dict:
        """A JSON file of this folder, {} while it does not exist."""
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def claim(run: RunFolder, config: dict, model: dict, reference: dict, initial: dict | None = None) -> dict:
    """Writes config.yaml and lineage.json, or refuses a folder that belongs to another dataset, architecture or start.

    Args:
        initial: of `initial_of`, the weights to start from.

    Returns:
        the lineage: dataset digests, architecture, training settings and the last step of each stage of rows that the run began with.
    """
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    now = {
        "dataset": {key: reference[key] for key in ("path", "digest", "chunks", "chunks_digest", "sequence_length")}
        | {"weights": weights_of(config["data"]), "curriculum": curriculum_of(config["data"], reference)},
        "model": model,
        "train": config["train"],
        "init_from": initial,
        "curriculum_ends": last_steps(config),
    }
    before = run.read(run.lineage)
    if before:
        refused = _differences({"curriculum": None} | before["dataset"], now["dataset"], "dataset")
        refused += _differences(_in_full(before["model"]), _in_full(model), "model")
        changed = _differences(_all_settings(before["train"]), _all_settings(now["train"]), "train")
        refused += [line for line in changed if line.split(":")[0].split(".")[1] in FIXED]
        started, starts = ((start or {}).get("digest", "no weights") for start in (before.get("init_from"), initial))
        refused += [f"train.init_from: {started} before, {starts} now"] if started != starts else []
        if refused:
            raise ConfigError(
                f"run folder {run.path} belongs to another run; choose another runtime.name. What differs:\n  "
                + "\n  ".join(refused)
            )
        for line in changed:
            if line.split(":")[0].split(".")[1] not in FREE:
                log.warning("%s: from here on the run is no longer the one that began.", line)
        ends = last_steps(config | {"train": before["train"]})  # of an older version's run, which does not name them
        now = {"curriculum_ends": ends} | before | {"train": now["train"]}
    elif initial:
        refuse_unlike(initial, model, run.path.parent.parent / reference["path"])
    write_atomic(run.lineage, json.dumps(now, indent=1))
    write_atomic(run.path / "config.yaml", yaml.safe_dump(without_secrets(config), sort_keys=False, allow_unicode=True))
    return now


def weights_of(data: dict) -> dict[str, float] | None:
    """The weight of each source in the section `data`, which decide the order of samples; None where there are none."""
    return {source["name"]: source["weight"] for source in data["sources"] if source["weight"]} or None


def curriculum_of(data: dict, reference: dict) -> list[dict] | None:
    """The stages of rows of other lengths, which decide the order of samples; None where there are none."""
    tables = reference.get("curriculum", [])
    return [
        stage | {"chunks_digest": table["chunks_digest"]}
        for stage, table in zip(data["curriculum"], tables, strict=True)
    ] or None


def _in_full(model: dict) -> dict:
    """With the defaults of fields that an older version did not have."""
    return LlamaConfig.from_dict(model).to_dict()


def _all_settings(train: dict) -> dict:
    """With the defaults of settings that an older version did not have; what `auto` stood for is not known."""
    defaults = TrainingConfig().model_dump(mode="json")
    return {name: value for name, value in defaults.items() if value != "auto"} | train


def _differences(before: dict, now: dict, section: str) -> list[str]:
    keys = [key for key in before if key in now and before[key] != now[key]]
    return [f"{section}.{key}: {before.get(key)} before, {now.get(key)} now" for key in keys]


def remove_staging(run: RunFolder) -> None:
    """Removes what a killed save left half-written; only called under the run's lock."""
    for path in run.checkpoints.glob(".step-*"):
        log.info("removing %s, left by a save that did not finish", path.name)
        shutil.rmtree(path)


def cut_metrics(run: RunFolder, step: int) -> None:
    """Cuts metrics.jsonl and samples.jsonl back to `step`, so that the resumed run neither repeats nor skips a line."""
    for path in (run.metrics, run.samples):
        if path.exists():
            _cut(path, step)


def _cut(path: Path, step: int) -> None:
    kept = 0
    for record, size in _whole_lines(path):
        if record["step"] > step:
            break
        kept += size
    with path.open("r+b") as file:
        file.truncate(kept)


def read_metrics(run: RunFolder) -> list[dict]:
    """Every line of metrics.jsonl before the first that is cut short or damaged, where the next attempt will cut the file off."""
    return [record for record, _ in _whole_lines(run.metrics)] if run.metrics.exists() else []


def _whole_lines(path: Path) -> Iterator[tuple[dict, int]]:
    """Records and their bytes, up to a line that a kill has cut short or the disk has damaged."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n"):
                return
            yield record, len(line)


def append_attempt(run: RunFolder, record: dict) -> None:
    append_line(run.attempts, record)


def append_line(path: Path, record: dict) -> None:
    """Adds a line of JSON, and waits until it is on the disk; a line that a full disk has cut short stays its own."""
    before = path.read_bytes() if path.exists() else b""
    cut = bool(before) and not before.endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def attempt_folders(run: RunFolder) -> list[Path]:
    """The folder of every attempt, oldest first: by number, since the hundredth's name sorts before the ninety-ninth's."""
    return sorted((run.path / "logs").glob("attempt-*"), key=number_of)


def number_of(attempt_dir: Path) -> int:
    return int(attempt_dir.name.removeprefix("attempt-"))


def attempts(run: RunFolder) -> list[dict]:
    """Every attempt at this run, oldest first."""
    if not run.attempts.exists():
        return []
    found = []
    for line in run.attempts.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # cut short by a kill or a full disk
            found.append(json.loads(line))
    return found
