"""A damaged dataset is refused by every command that reads it after its preparation, and nothing is computed from it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.evaluate.stage import evaluate, filler_tokens
from infini_llama.tasks.export.exporting import export
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.records.lineage import Conversation
from infini_llama.tasks.report.dataset import measured_dataset
from infini_llama.tasks.runs.load import dataset_of, load_run
from infini_llama.tasks.runs.reading import reading_of
from infini_llama.tasks.storage.artifacts import Damaged, read_dataset
from infini_llama.tasks.train.worker.callbacks.samples import sample_texts
from support.damage import flip


def exchange_two_ids(path: Path) -> None:
    fields = json.loads(path.read_text())
    vocabulary = fields["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(fields))


def ones(path: Path) -> None:
    np.save(path, np.ones_like(np.load(path)))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [
    ("tokenizer.json", exchange_two_ids),
    ("tokenizer.json", Path.unlink),
    ("tokenizer.json", replace_by_a_folder),
    ("token_bytes.npy", ones),
    ("token_bytes.npy", flip),
    ("manifest.json", flip),
    ("shard", flip),
    ("rows", flip),
]
READ_BY_MODEL = {"tokenizer.json", "manifest.json"}  # what generate and export read


def damaged(run: Path, name: str, damage) -> Path:
    dataset = dataset_of(run)
    (table,) = dataset.glob("chunks/*/validation.rows.npy")
    shard = dataset / read_dataset(dataset).content.validation.shards[0].file
    path = {"shard": shard, "rows": table}.get(name, dataset / name)
    damage(path)
    return path


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_file_is_refused_by_what_reads_it(run_of, tmp_path, name, damage):
    run, model = run_of()
    dataset = dataset_of(run)
    path = damaged(run, name, damage)
    readers = [lambda: evaluate(run), lambda: measured_dataset(dataset)]
    if name in ("shard", "rows"):
        readers += [lambda: filler_tokens(run, reading_of(run).encoder, "text", 100)]
    if name in READ_BY_MODEL:
        output = str(tmp_path / "exported")
        readers += [
            lambda: load_run(run),
            lambda: export(run, Path(output), "latest", "float32", "5GB"),
        ]
        readers += [
            lambda: sample_texts(
                model, dataset, TrainingConfig(sample_prompts=["a"]), Conversation()
            )
        ]
    for read in readers:
        with pytest.raises(DataError) as refused:
            read()
        assert str(path) in str(refused.value) and "preprocess CONFIG --repair" in str(
            refused.value
        )
    assert (
        not (run / "evaluations.jsonl").exists()
        and not (tmp_path / "exported").exists()
    )


def test_another_dataset_under_the_same_name_is_refused(run_of, data, tmp_path):
    run, _ = run_of()
    dataset, home = dataset_of(run), tmp_path / "other"
    shutil.rmtree(dataset)
    shutil.copytree(
        home / preprocess(data(validation_fraction=0.3), home).path, dataset
    )
    with pytest.raises(DataError, match=str(dataset)) as refused:
        load_run(run)
    assert not isinstance(refused.value, Damaged) and "--repair" not in str(
        refused.value
    ), "it is undamaged"
    shutil.rmtree(dataset)
    with pytest.raises(DataError, match="was moved or removed"):
        load_run(run)
