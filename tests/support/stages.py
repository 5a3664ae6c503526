"""Preparing data in a process of its own, and a look at the documents of a text without a dataset."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.corpus import Corpus, OfSource
from infini_llama.tasks.preprocess.tokens.dataset import select
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.preprocess.tokens.units import open_unit, recipe_for
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.manifest import SPLITS, LeftOut
from infini_llama.tasks.tokenizers.engines import reference_engine
from support.tokenizer_kinds import train_bpe


def start_build(
    data: DataConfig, home: Path, **variables: str
) -> subprocess.Popen[str]:
    """`preprocess` in a process of its own, which has printed its first line, "started", and will print the reference."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("build.py")),
        data.model_dump_json(),
        str(home),
    ]
    process = subprocess.Popen(
        command, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "started\n"
    return process


def finish_build(process: subprocess.Popen[str]) -> DatasetRef:
    """The reference that the process prints; it must exit with 0."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return DatasetRef.model_validate(json.loads(output.splitlines()[-1]))


@dataclass(frozen=True)
class Survey:
    """The documents of a text that are kept, in order, what was left out, the names of its files, and the names of its units."""

    train: list[str]
    validation: list[str]
    report: LeftOut
    names: list[str]
    identity: list[OfSource[str]]

    @property
    def documents(self) -> list[str]:
        return sorted(self.train + self.validation)


def survey(data: DataConfig) -> Survey:
    """Reads a text as `preprocess` does, into units of a tokenizer over bytes; its splits may be empty."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(data, Path(folder))
        tokenizer = train_bpe([], 257)
        recipe = recipe_for(Path(folder), tokenizer, 0, reference_engine(), True)
        corpus.prepare(recipe)
        sources = corpus.units_by_source()
        units = [
            open_unit(recipe, name)
            for source in sources
            for name in (*source.validation, *source.training)
        ]
        selection = select(units, corpus.data.deduplicate)
        split: dict[str, list[str]] = {}
        for name in SPLITS:
            split[name] = []
            for unit, kept in zip(units, selection.kept[name], strict=True):
                if len(kept):
                    offsets, values = map_shard(unit.shard_path(name))
                    documents = [
                        values[start : end - 1].tolist()
                        for start, end in pairwise(offsets)
                    ]
                    split[name] += [
                        tokenizer.decode(ids)
                        for ids, own in zip(documents, kept, strict=True)
                        if own
                    ]
        names = [file.name for part in corpus.parts for file in part.files]
        return Survey(
            **split,
            report=corpus.left_out(selection.duplicates, selection.also_validation),
            names=names,
            identity=sources,
        )
