"""Preparing and verifying data with JSON in and out, as the Prefect tasks have it."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess import references as dataset_references
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.preprocess.corpus import Corpus, SourceUnits
from infini_llama.tasks.preprocess.tokenizers.engines import reference_engine
from infini_llama.tasks.preprocess.tokenizers.tokenizer import train_bpe
from infini_llama.tasks.preprocess.tokens.dataset import select
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.preprocess.tokens.units import open_unit, recipe_for
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.manifest import SPLITS, LeftOut
from infini_llama.tasks.report import dataset as dataset_report
from infini_llama.tasks.storage import artifacts
from infini_llama.tasks.verify_data import checks


def preprocess(data: dict[str, Any], home: str | Path, repair: bool = False) -> dict[str, Any]:
    return stage.preprocess(DataConfig.model_validate(data), Path(home), repair).to_json()


def start_build(data: dict[str, Any], home: Path, **variables: str) -> subprocess.Popen[str]:
    """`preprocess` in a process of its own, which has printed its first line, "started", and will print the reference."""
    command = [sys.executable, str(Path(__file__).with_name("build.py")), json.dumps(data), str(home)]
    process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "started\n"
    return process


def finish_build(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The reference that the process prints; it must exit with 0."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def lookup(data: dict[str, Any], home: str | Path) -> dict[str, Any] | None:
    found = stage.lookup(DataConfig.model_validate(data), Path(home))
    return found and found.to_json()


def plan(data: dict[str, Any], home: str | Path) -> dict[str, Any]:
    return stage.Preparation(DataConfig.model_validate(data), Path(home)).plan().to_json()


def verify(reference: dict[str, Any], home: str | Path, level: str, full_below: int) -> dict[str, Any]:
    return checks.verify(DatasetRef.from_json(reference), Path(home), level, full_below).to_json()


@dataclass(frozen=True)
class Survey:
    """The documents of a text that are kept, in order, what was left out, the names of its files, and the names of its units."""

    train: list[str]
    validation: list[str]
    report: LeftOut
    names: list[str]
    identity: list[SourceUnits]


def survey(data: dict[str, Any], home: Path | None = None) -> Survey:
    """Reads a text as `preprocess` does, into units of a tokenizer over bytes; its splits may be empty."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(DataConfig.model_validate(data), home or Path(folder))
        tokenizer = train_bpe([], 257)
        recipe = recipe_for(Path(folder), tokenizer, 0, reference_engine(), "")
        corpus.prepare(recipe)
        sources = corpus.units_by_source()
        units = [open_unit(recipe, name) for source in sources for name in (*source.held_out, *source.mixed)]
        selection = select(units, corpus.data.deduplicate)
        split: dict[str, list[str]] = {}
        for name in SPLITS:
            split[name] = []
            for unit, kept in zip(units, selection.kept[name], strict=True):
                if len(kept):
                    offsets, values = map_shard(unit.stream(name))
                    documents = [values[start : end - 1].tolist() for start, end in pairwise(offsets)]
                    split[name] += [tokenizer.decode(ids) for ids, own in zip(documents, kept, strict=True) if own]
        names = [file.name for part in corpus.parts for file in part.files]
        return Survey(
            **split,
            report=corpus.left_out(selection.duplicates, selection.also_validation),
            names=names,
            identity=sources,
        )


def describe(path: Path) -> dict[str, Any]:
    return dataset_report.describe(path).to_json()


def reference_for(data: dict[str, Any], dataset: Path, home: Path) -> dict[str, Any]:
    return dataset_references.reference_for(DataConfig.model_validate(data), dataset, home).to_json()


def references(dataset: Path, home: Path) -> list[dict[str, Any]]:
    return [reference.to_json() for reference in dataset_references.references(dataset, home)]


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    return artifacts.read_manifest(path, kind).to_json()
