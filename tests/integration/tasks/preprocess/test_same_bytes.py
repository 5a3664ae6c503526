"""One dataset, whoever builds it: any number of workers, any engine, left alone or killed again and again."""

import json
import random
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens import parts
from infini_llama.tasks.storage.artifacts import read_dataset
from support.stages import finish_build, start_build
from support.tokenizer_kinds import train_bpe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
KILLS = 10  # in each of the ten cases


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    texts = [
        path.read_text(encoding="utf-8")
        for path in sorted(Path(json.__file__).parent.glob("*.py"))
    ]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(texts, 600).save(str(path))
    return path


@pytest.mark.parametrize(
    ("workers", "threads"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4)]
)
@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_engines_workers_and_kills_do_not_change_the_bytes(
    data, digests, tokenizer, tmp_path, engine, workers, threads, monkeypatch
):
    if not find_spec(engine):
        pytest.skip(f"{engine} is not installed")
    text = f"{Path(json.__file__).parent.parent}/[a-h]*/*.py"
    plain = data(files=[text], tokenizer={"path": str(tokenizer)})
    settings = changed(plain, num_workers=workers)
    monkeypatch.setattr(parts, "RUN_BYTES", 100_000)
    monkeypatch.setattr(parts, "PER_FILE", 0)
    monkeypatch.setattr(stage, "WORTH_A_FAST_ENGINE", 10**9)
    expected, whole = (
        preprocess(plain, tmp_path / "plain"),
        digests(tmp_path / "plain" / "datasets"),
    )

    def start(home: Path) -> subprocess.Popen:
        return start_build(
            settings, home, ENGINE=engine, RUN_BYTES="100000", MOST_THREADS=str(threads)
        )

    def finish(home: Path) -> None:
        """Builds to the end, and finds every byte as it should be."""
        reference = finish_build(start(home))
        assert changed(reference, built=[]) == changed(expected, built=[])
        assert digests(home / "datasets") == whole
        assert read_dataset(home / reference.path).meta.engine.name == engine
        assert not list((home / "datasets").rglob(".*.tmp"))

    started = time.monotonic()
    finish(tmp_path / "whole")
    seconds = time.monotonic() - started
    choose, home, killed = random.Random(f"{engine} {workers} {threads}"), 0, 0
    while killed < KILLS:
        child = start(tmp_path / str(home))
        time.sleep(choose.uniform(0, seconds / 3))
        child.kill()
        child.communicate()
        killed += child.returncode == -9
        if (
            child.returncode == 0 or choose.random() < 0.25
        ):  # sometimes many kills in one build, sometimes one
            finish(tmp_path / str(home))
            home += 1
    finish(tmp_path / str(home))
