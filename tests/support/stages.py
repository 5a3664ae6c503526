"""Preparing and verifying data with JSON in and out, as the Prefect tasks have it."""

from pathlib import Path
from typing import Any

from infini_llama.configs.schema import DataConfig
from infini_llama.flows import datasets
from infini_llama.tasks.preprocess import stage, summary
from infini_llama.tasks.preprocess.sources import survey as surveys
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.storage import artifacts
from infini_llama.tasks.verify_data import checks


def preprocess(data: dict[str, Any], home: str | Path, repair: bool = False) -> dict[str, Any]:
    return stage.preprocess(DataConfig.model_validate(data), Path(home), repair).to_json()


def lookup(data: dict[str, Any], home: str | Path) -> dict[str, Any] | None:
    found = stage.lookup(DataConfig.model_validate(data), Path(home))
    return found and found.to_json()


def plan(data: dict[str, Any], home: str | Path) -> dict[str, Any]:
    return stage.plan(DataConfig.model_validate(data), Path(home)).to_json()


def verify(reference: dict[str, Any], home: str | Path, level: str, full_below: int) -> dict[str, Any]:
    return checks.verify(DatasetRef.from_json(reference), Path(home), level, full_below).to_json()


def survey(data: dict[str, Any], notes: Path | None = None) -> surveys.Corpus:
    return surveys.survey(DataConfig.model_validate(data), notes)


def describe(path: Path) -> dict[str, Any]:
    return summary.describe(path).to_json()


def reference_for(data: dict[str, Any], dataset: Path, home: Path) -> dict[str, Any]:
    return datasets.reference_for(DataConfig.model_validate(data), dataset, home).to_json()


def references(dataset: Path, home: Path) -> list[dict[str, Any]]:
    return [reference.to_json() for reference in datasets.references(dataset, home)]


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    return artifacts.read_manifest(path, kind).to_json()
