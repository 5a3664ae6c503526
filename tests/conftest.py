"""Fixtures of all tests: one seed, a small corpus of made-up text, a dataset built from it once, runs on it, and forks of torch."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.parts import SETTLED
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.storage.artifacts import file_checksum
from support import made_up_runs
from support.preloaded import Server

settings.register_profile("tests", deadline=None)  # a busy machine is no fault
settings.load_profile("tests")

WORDS = [
    "the",
    "cat",
    "sat",
    "self.value",
    "=",
    "{x:",
    "1}",
    "«größer»",
    "日本語",
    "🙂",
    "\n",
    "",
    "\t",
    "None:\n    return",
]


def pytest_configure() -> None:
    """No network, and child processes obey Ctrl-C: they inherit that it is ignored where a script started the tests with `&`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    choose, folder = random.Random(7), tmp_path_factory.mktemp("corpus") / "text"
    folder.mkdir()
    for number in range(40):
        text = " ".join(choose.choices(WORDS, k=choose.randint(1, 120)))
        (folder / f"text-{number:03d}.txt").write_text(text, encoding="utf-8")
    # What was written just now is not recognized as unchanged.
    time.sleep(SETTLED / 1e9 + 0.1)
    return folder


@pytest.fixture(scope="session")
def data(corpus: Path) -> Callable[..., DataConfig]:
    """The `data` section for the corpus, with changes."""
    given = {
        "files": [f"{corpus}/**/*.txt"],
        "validation_fraction": 0.2,
        "sequence_length": 16,
        "device": "cpu",
        "tokenizer": {"vocab_size": 300},
    }

    def data(**changes: Any) -> DataConfig:
        source = changes.get("source", "files")
        read = {name: value for name, value in given.items() if name != "files"}
        return DataConfig.model_validate(
            (given if source == "files" else read) | changes
        )

    return data


@pytest.fixture(autouse=True)
def one_seed_and_thread() -> None:
    """Each test starts from the same seed, on one thread."""
    import torch  # not in the process that only distributes the tests

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The process with torch of this test process."""
    server = Server()
    yield server
    server.close()


def _with_small_parts(patch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUN_BYTES": 1500, "PER_FILE": 0}.items():
        patch.setattr(f"infini_llama.tasks.preprocess.tokens.parts.{name}", value)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are several parts, so that a small text has several units and shards."""
    _with_small_parts(monkeypatch)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch, small_parts: None) -> None:
    """A file is several units, too; not for processes that this one starts."""
    monkeypatch.setattr("infini_llama.tasks.preprocess.tokens.parts.UNIT_BYTES", 2000)


@pytest.fixture(scope="session")
def _built(
    tmp_path_factory: pytest.TempPathFactory, data: Callable[..., DataConfig]
) -> tuple[Path, DatasetRef]:
    home = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        _with_small_parts(patch)
        return home, preprocess(data(), home)


@pytest.fixture
def built(
    _built: tuple[Path, DatasetRef], small_parts: None, tmp_path: Path
) -> tuple[Path, DatasetRef]:
    """A home of one's own with the built dataset, and its reference."""
    home, reference = _built
    return shutil.copytree(home, tmp_path / "home", symlinks=True), reference


@pytest.fixture
def dataset(built: tuple[Path, DatasetRef]) -> Path:
    """The folder of the built dataset."""
    home, reference = built
    return home / reference.path


@pytest.fixture
def row_table(built: tuple[Path, DatasetRef], dataset: Path) -> Path:
    """The folder of its row table."""
    return dataset / "chunks" / built[1].row_table


@pytest.fixture
def digests() -> Callable[[Path], dict[str, str]]:
    """The bytes of everything below a folder, but for what says when it was made."""

    def below(folder: Path) -> dict[str, str]:
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "manifest.json"
        ]
        return {
            path.relative_to(folder).as_posix(): file_checksum(path) for path in files
        }

    return below


@pytest.fixture
def make_run(
    built: tuple[Path, DatasetRef], data: Callable[..., DataConfig]
) -> Callable[..., Path]:
    """make(name, steps, finished, gates, **train): the folder of a run on the built dataset."""
    return partial(made_up_runs.make_run, *built, data())


@pytest.fixture
def read_page() -> Callable[[str], made_up_runs.Reading]:
    """A page that needs nothing but itself."""

    def read(html: str) -> made_up_runs.Reading:
        page = made_up_runs.Reading(html)
        assert not page.fetched
        return page

    return read


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`Ranks` of a process group of one."""
    from infini_llama.tasks.train.worker.strategies.ranks import Ranks

    place = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    ranks = Ranks("cpu", "gloo")
    yield ranks
    ranks.leave()


@pytest.fixture
def run_of(
    built: tuple[Path, DatasetRef], data: Callable[..., DataConfig], ranks: Any
) -> Callable[..., tuple[Path, Any]]:
    """run_of(name, **model): see `trained_run`."""
    from support.trained_runs import trained_run

    return partial(trained_run, *built, data())
