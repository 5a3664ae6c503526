"""The first hour as docs/quickstart.md has it: every command of the page in its order, in an empty home folder."""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from support.hub import write_to_hub
from support.shell import shell

PAGE = (Path(__file__).parents[2] / "docs/quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("infini-llama ")
]
SMALL = {
    "data": {"sequence_length": 64, "tokenizer": {"vocab_size": 400}},
    "model": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "segment_length": 16,
    },
    "train": {"max_steps": 4, "warmup_steps": 1, "eval_steps": 2, "save_steps": 2},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A user's folder with texts."""
    (tmp_path / "texts").mkdir()
    for number in range(50):
        (tmp_path / f"texts/{number}.txt").write_text(
            f"Once upon a time there were {number} cats on a mat. " * 40
        )
    return tmp_path


def shrink(config: Path) -> None:
    """What init wrote, with a model that is trained in seconds."""
    written = yaml.safe_load(config.read_text(encoding="utf-8"))
    for section, changes in SMALL.items():
        assert changes.keys() <= written[section].keys(), (
            "a key that the page's reader would not find in the file"
        )
        written[section] |= changes
    config.write_text(yaml.safe_dump(written), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_guide_in_its_order(folder):
    assert len(COMMANDS) == 12 and COMMANDS[0].startswith(
        "infini-llama init my.yaml --files ~/texts"
    )
    for line in COMMANDS:
        # 1: warnings, for example of a busy machine.
        shell(line, folder, codes=(0, 1) if "doctor" in line else (0,))
        if " init " in line:
            shrink(folder / "my.yaml")
    for made in (
        "workspace/runs/my/report.html",
        "dataset.html",
        "compared.html",
        "my-model/model.safetensors",
    ):
        assert (folder / made).stat().st_size > 1000, made
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shell(shlex.join([sys.executable, "-c", program]), folder).startswith("Once")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_llama_of_the_hub_by_its_name(folder):
    """From OWNER/NAME in a local folder of the Hub to a trained model that transformers opens."""
    hub = folder / "hub"
    write_to_hub(hub, "someone/small-llama")

    def run(line: str, code: int = 0) -> str:
        return shell(f"infini-llama {line}", folder, (code,), HF_HUB_CACHE=str(hub))

    imported = json.loads(
        run("import someone/small-llama --output plain.yaml --json --quiet")
    )
    assert (
        imported["memory"] > 0
        and abs(imported["untrained_loss"] - math.log(257)) < 1e-6
    )
    run("init my.yaml --from someone/small-llama --files texts")
    written = yaml.safe_load((folder / "my.yaml").read_text())
    assert written["data"]["files"] == ["texts"] and written["train"][
        "init_from"
    ].startswith(str(hub))
    assert (
        json.loads(
            run("run my.yaml train.max_steps=4 train.warmup_steps=1 --json --quiet")
        )["steps"]
        == 4
    )
    run("export my --output my-llama")
    assert "no-such" in run(
        "init other.yaml --from someone/no-such --files texts", code=64
    )
    assert not (folder / "other.yaml").exists()
