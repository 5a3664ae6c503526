"""One dataset, whoever builds it: any number of workers, any engine, left alone or killed again and again."""

import json
import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.preprocess.tokenizers.tokenizer import train_bpe
from infini_llama.tasks.preprocess.tokens import parts
from support.stages import preprocess, read_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
KILLS = 10  # in each of the six cases
BUILD = """
import json, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens import parts
parts.RUN_BYTES, parts.PER_FILE = 100_000, 0
if __name__ == "__main__":
    stage.WORTH_A_FAST_ENGINE = 10**9 if sys.argv[3] == "tokenizers" else 1
    print("begun", flush=True)
    print(json.dumps(preprocess(DataConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2])).to_json()))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(texts, 600).save(str(path))
    return path


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_any_engine_and_number_of_workers_killed_at_random_or_not_gives_the_same_bytes(
    data, digests, tokenizer, tmp_path, engine, workers, monkeypatch
):
    if not find_spec(engine):
        pytest.skip(f"{engine} is not installed (infini-llama[fast])")
    text = f"{Path(json.__file__).parent.parent}/[a-h]*/*.py"
    plain = data(files=[text], tokenizer={"path": str(tokenizer)})
    settings = plain | {"num_workers": workers}
    monkeypatch.setattr(parts, "RUN_BYTES", 100_000)
    monkeypatch.setattr(parts, "PER_FILE", 0)
    monkeypatch.setattr(stage, "WORTH_A_FAST_ENGINE", 10**9)
    expected, whole = preprocess(plain, str(tmp_path / "plain")), digests(tmp_path / "plain" / "datasets")
    script = tmp_path / "build.py"
    script.write_text(BUILD)

    def start(home: Path) -> subprocess.Popen:
        command = [sys.executable, str(script), json.dumps(settings), str(home), engine]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert child.stdout and child.stdout.readline() == "begun\n"
        return child

    def finish(home: Path) -> None:
        """Builds to the end, and finds every byte as it should be."""
        reference = json.loads(start(home).communicate()[0])
        assert reference | {"built": []} == expected | {"built": []}
        assert digests(home / "datasets") == whole
        assert read_manifest(home / reference["path"], "dataset")["meta"]["engine"]["name"] == engine
        assert not list((home / "datasets").rglob(".*.tmp"))

    started = time.monotonic()
    finish(tmp_path / "whole")
    seconds = time.monotonic() - started
    choose, home, killed = random.Random(f"{engine} {workers}"), 0, 0
    while killed < KILLS:
        child = start(tmp_path / str(home))
        time.sleep(choose.uniform(0, seconds / 3))
        child.kill()
        child.communicate()
        killed += child.returncode == -9
        if child.returncode == 0 or choose.random() < 0.25:  # sometimes many kills in one build, sometimes one
            finish(tmp_path / str(home))
            home += 1
    finish(tmp_path / str(home))
