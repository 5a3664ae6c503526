"""What a run is bound to: dataset, architecture and the settings that must not change; kept in lineage.json."""

import json
import logging

import yaml

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.keys import REMOVED
from infini_llama.configs.schema import TrainingConfig
from infini_llama.configs.secrets import without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.runs.run_folder import RunFolder
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
    before = run.read_lineage()
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
    """With the defaults of settings that another version does not have; what `auto` stood for is not known."""
    defaults = TrainingConfig().model_dump(mode="json")
    defaults |= {key.removeprefix("train."): value for key, (value, _) in REMOVED.items() if key.startswith("train.")}
    return {name: value for name, value in defaults.items() if value != "auto"} | train


def _differences(before: dict, now: dict, section: str) -> list[str]:
    keys = [key for key in before if key in now and before[key] != now[key]]
    return [f"{section}.{key}: {before.get(key)} before, {now.get(key)} now" for key in keys]
