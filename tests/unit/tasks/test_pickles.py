"""A pickle in the place of any file of a dataset, checkpoint or export is never run, whatever vouches for it."""

import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.reading import changed
from infini_llama.tasks.export.exporting import export
from infini_llama.tasks.export.importing import open_model, write_configuration
from infini_llama.tasks.runs.checkpoints import KIND, read_state
from infini_llama.tasks.runs.load import load_run
from infini_llama.tasks.storage.artifacts import MANIFEST, read_manifest
from infini_llama.tasks.storage.hf_folder import open_folder
from infini_llama.tasks.train.worker.initial_model import load_pretrained
from infini_llama.tasks.verify_data.checks import verify
from support.damage import reseal

# Written for the `datasets` library, which reads them as JSON.
NOT_READ = (
    "state.json",
    "dataset_info.json",
)


class Malicious:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.mark,)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "it ran"


@pytest.fixture
def poison(mark):
    """A pickle that makes `mark` when it is opened, which it is once here."""
    made = pickle.dumps(Malicious(str(mark)))
    pickle.loads(made)
    mark.rmdir()
    return made


@contextmanager
def replaced(folder: Path, name: str, content: bytes) -> Iterator[None]:
    """Another content of a file, for which its manifest vouches."""
    before = {path: path.read_bytes() for path in (folder / name, folder / MANIFEST)}
    (folder / name).write_bytes(content)
    reseal(folder)
    yield
    for path, old in before.items():
        path.write_bytes(old)


def test_a_pickle_in_any_file_of_a_dataset(built, dataset, row_table, mark, poison):
    home, reference = built
    files = [(dataset, name) for name in read_manifest(dataset, "dataset").files]
    files += [(row_table, name) for name in read_manifest(row_table, "chunks").files]
    assert len(files) >= 8
    for folder, name in files:
        with replaced(folder, name, poison):
            digest, row_table_digest = (
                read_manifest(dataset, "dataset").digest,
                read_manifest(row_table, "chunks").digest,
            )
            with nullcontext() if name.endswith(NOT_READ) else pytest.raises(DataError):
                verify(
                    changed(
                        reference, digest=digest, row_table_digest=row_table_digest
                    ),
                    home,
                    "deep",
                )
        assert not mark.exists(), name
    verify(reference, home, "deep")


def test_a_pickle_in_any_file_of_a_checkpoint(run_of, mark, poison):
    run, _ = run_of()
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    names = list(read_manifest(checkpoint, KIND).files)
    assert len(names) >= 3
    load_run(run)
    for name in names:
        with (
            replaced(checkpoint, name, poison),
            pytest.raises((ConfigError, DataError)),
        ):
            read_state(checkpoint)
            load_run(run, checkpoint.name)
        assert not mark.exists(), name
    (checkpoint / MANIFEST).write_bytes(poison)
    with pytest.raises((ConfigError, DataError)):
        load_run(run)
    assert not mark.exists()


def test_a_pickle_in_any_file_of_an_export(run_of, tmp_path, mark, poison):
    run, model = run_of(attention="infini")
    export(run, tmp_path / "out", "latest", "float32", "20KB")

    def take_in(folder) -> None:
        write_configuration(open_model(folder), folder.parent / "run.yaml")
        load_pretrained(type(model)(open_folder(folder).config), folder)

    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    refused = []
    for number, name in enumerate(names):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "out", copy / "out")
        (copy / "out" / name).write_bytes(poison)
        try:
            take_in(copy / "out")
        except (ConfigError, DataError):
            refused.append(name)
        assert not mark.exists(), name
    weights = {name for name in names if name.endswith(".safetensors")}
    assert len(weights) > 1
    assert weights | {"config.json", "model.safetensors.index.json"} <= set(refused)
