"""Every file that the program reads back, damaged in every way, under every command: refused, healed or without effect."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from support import mutations
from support.laboratory import CONFIG, Laboratory
from support.preloaded import PADDING, SPACE

ROOT = Path(__file__).parents[2]
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "self.value",
    "=",
    "{x:",
    "1}",
    "größer",
    "日本語",
    "🙂",
    "None:",
    "return",
]
# Fmt: skip.
SMALL = {
    "model": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "segment_length": 8,
    },
    "train": CONFIG["train"]
    | {
        "max_steps": 8,
        "eval_steps": 4,
        "save_steps": 4,
        "warmup_steps": 2,
        "logging_steps": 2,
        "global_batch_size": 4,
        "micro_batch_size": 2,
    },
}


def finished_runs(home: Path, server) -> None:
    """The runs `one` and `other`, each with a dataset and an evaluation."""
    home.mkdir()
    for name, shift in (("other", 1), ("one", 0)):
        texts = home.parent / f"texts-{name}"
        texts.mkdir()
        for number in range(40):
            words = [
                WORDS[(number * 7 + place * (place + shift)) % len(WORDS)]
                for place in range(20 + number)
            ]
            (texts / f"{number}.txt").write_text(" ".join(words))
        data = {
            "files": [f"{texts}/*.txt"],
            "validation_fraction": 0.2,
            "sequence_length": 16,
            "device": "cpu",
        }
        evaluate = {"after_training": ["perplexity"]}
        config = (
            CONFIG
            | SMALL
            | {"data": data | {"tokenizer": {"vocab_size": 300}}, "evaluate": evaluate}
        )
        (home / "config.yaml").write_text(yaml.safe_dump(config))
        lab = Laboratory(home, home / "config.yaml", server)
        lab.finish(name)
        for log in home.glob("*.log"):
            log.unlink()


def results_of(folder: Path, seed: int, count: int) -> list[dict]:
    """The outcome of each case, from a process that has imported everything."""
    results = folder / f"results-{seed}.jsonl"
    command = [
        sys.executable,
        mutations.__file__,
        str(folder / "pristine"),
        str(seed),
        str(count),
        str(results),
    ]
    environment = os.environ | {
        PADDING: "-" * SPACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    subprocess.run([*command, "-" * SPACE], check=True, env=environment, cwd=ROOT)
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server) -> Path:
    folder = tmp_path_factory.mktemp("mutations")
    finished_runs(folder / "pristine", server)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_files_are_refused_healed_or_harmless(folder, seed):
    cases = results_of(folder, seed, 1000)
    print(Counter(case["verdict"] for case in cases))
    bad = [
        case for case in cases if case["verdict"] in ("exception", "failed", "silent")
    ]
    assert not bad, "\n".join(json.dumps(case, indent=1) for case in bad[:10])
