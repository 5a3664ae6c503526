"""Prints the hashes of weights and optimizer state after 20 steps of two presets, to compare two commits or two versions of torch.

The text is made here, and precision, attention backend, threads and compilation are set, so that only code, torch and the
processor decide what is printed. A change that should not move a weight prints the same lines before and after.
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from infini_llama.tasks.records.summary import TrainingResult
from infini_llama.tasks.runs.run_folder import RunFolder

PRESETS = ("tiny", "tiny_infini")
DOCUMENTS, WORDS = 400, 220  # per document
SETTINGS = (
    "train.max_steps=20",
    "train.warmup_steps=5",
    "train.compile=off",
    "environment.device=cpu",
    "environment.precision=fp32",
    "environment.attention_backend=sdpa",
    "environment.threads=1",
)


def write_text(folder: Path) -> None:
    """Documents of made-up words, frequent and rare ones, the same on every machine."""
    draw = random.Random(0)
    syllables = [first + vowel for first in "bcdfghklmnprstvz" for vowel in "aeiou"]
    words = ["".join(draw.choices(syllables, k=1 + rank % 4)) for rank in range(5000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    folder.mkdir()
    for number in range(DOCUMENTS):
        text = " ".join(draw.choices(words, weights, k=WORDS))
        (folder / f"{number:03}.txt").write_text(text + ".\n", encoding="utf-8")


def train(preset: str, home: Path) -> TrainingResult:
    """The result of 20 steps, by the command itself."""
    command = [
        str(Path(sys.executable).with_name("infini-llama")),
        "run",
        preset,
        "--direct",
        "--quiet",
    ]
    text = f"data.files=[{home}/text/*.txt]"
    places = (
        f"runtime.home={home}",
        f"runtime.name={preset}",
        "data.source=files",
        text,
    )
    done = subprocess.run(
        [*command, *places, *SETTINGS], capture_output=True, text=True, env=os.environ
    )
    if done.returncode:
        raise SystemExit(
            f"{preset} ended with code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    run = RunFolder(home / "runs" / preset)
    return run.read(TrainingResult, run.result)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hashes-") as folder:
        write_text(Path(folder) / "text")
        for preset in PRESETS:
            result = train(preset, Path(folder))
            print(
                f"{preset}: weights {result.weights_sha256[:8]}, optimizer {result.optimizer_sha256[:8]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
