"""A real pretrained Llama, from its folder to an export of an Infini-Llama; `make pretrained` fetches and converts it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from infini_llama.model.llama import Llama
from infini_llama.tasks.runs.load import load_run
from infini_llama.tasks.storage.hf_folder import open_folder
from infini_llama.tasks.train.worker.initial_model import load_pretrained
from support.laboratory import COMMAND, Laboratory, own_environment

SECONDS = 3000  # of a command, on two cores with other work
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * SECONDS)]
PROSE = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def model() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    folder = os.environ.get("PRETRAINED")
    if folder is None:
        pytest.skip("PRETRAINED names no folder; run `make pretrained`")
    return Path(folder)


def answer(home: Path, *words: str) -> dict:
    ran = subprocess.run(
        [COMMAND, *words, "--json"],
        env=own_environment(home),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@torch.no_grad()
def test_logits_are_those_of_transformers(model):
    ours = Llama(open_folder(model).config).eval()
    load_pretrained(ours, model)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    text = (
        "The memory of a model is what it can still use of a text that it has read long before. "
        * 4
    )
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-3)


def shorten(written, folder, ranks, parallel):
    """Let a configuration take minutes: short texts of this project's prose, and 20 steps."""
    config = yaml.safe_load(written.read_text())
    for source in config["data"].get("sources", [config["data"]]):
        source |= {"files": [f"{folder}/texts/*.md"]} if "files" in source else {}
        source |= (
            {"passkey": source["passkey"] | {"documents": 200, "repetitions": 1}}
            if "passkey" in source
            else {}
        )
    config["data"]["sequence_length"] = 256
    short = {
        "max_steps": 20,
        "global_batch_size": 2,
        "micro_batch_size": 2 // ranks,
        "parallel": parallel,
    }
    config["train"] |= short | {
        "eval_steps": 10,
        "eval_tokens": 4000,
        "save_steps": 5,
        "warmup_steps": 2,
    }
    config["train"]["sample_prompts"] = []
    config["evaluate"] = {"after_training": ["export"]}
    config["runtime"] = {"hang_timeout": SECONDS}
    config["environment"] = {
        "device": "cpu",
        "nproc_per_node": ranks,
        "precision": "fp32",
    }
    written.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(("ranks", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_it_learns_to_remember_killed_and_resumed_bitwise_and_is_exported(
    model, tmp_path, ranks, parallel
):
    written = tmp_path / "start.yaml"
    answer(
        tmp_path,
        "import",
        str(model),
        "--output",
        str(written),
        "--attention",
        "infini",
        "--segment-length",
        "64",
    )
    # Which nobody edits meanwhile.
    shutil.copytree(PROSE, tmp_path / "texts", ignore=shutil.ignore_patterns("images"))
    config = yaml.safe_load(written.read_text())
    assert (
        config["model"]["memory_layers"] == [17, 18, 20, 23]
        and config["train"]["frozen_layers"] == 17
    )
    assert {"far", "english"} < {source["name"] for source in config["data"]["sources"]}
    shorten(written, tmp_path, ranks, parallel)
    lab = Laboratory(tmp_path, written)

    calm = lab.start("calm")
    assert calm.wait(SECONDS) == 0, calm.log.read_text()
    lab.kill_at(11, "killed")
    again = lab.start("killed")
    assert again.wait(SECONDS) == 0, again.log.read_text()
    lab.assert_same("killed", "calm")
    before = next(line for line in lab.metrics("calm") if line["kind"] == "validation")
    assert before["step"] == 0 and 2 < before["loss"] < 5  # of untrained weights: 10.8

    exported = lab.run_dir("calm") / "export"
    ours, _, _ = load_run(lab.run_dir("calm"), "latest")
    theirs = AutoModelForCausalLM.from_pretrained(
        exported, trust_remote_code=True
    ).eval()
    tokenizer, original = (
        AutoTokenizer.from_pretrained(path, trust_remote_code=True)
        for path in (exported, model)
    )
    ids = original(
        "A number is hidden in this text. " * 20, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours.eval()(ids))
    question = [{"role": "user", "content": "What is the pass key?"}]
    said, expected = (
        each.apply_chat_template(question, tokenize=False)
        for each in (tokenizer, original)
    )
    assert said == expected
    written = tmp_path / "language.yaml"
    segments = ("--segment-length", "64", "--attend-previous-segment")
    answer(tmp_path, "import", str(exported), "--output", str(written), *segments)
    config = yaml.safe_load(written.read_text())
    assert (
        config["model"]["memory_layers"] == [17, 18, 20, 23]
        and "init_gate" not in config["train"]
    )
    shorten(written, tmp_path, ranks, "ddp")
    second = Laboratory(tmp_path, written).start("language")
    assert second.wait(SECONDS) == 0, second.log.read_text()
    read_on, _, _ = load_run(lab.run_dir("language"), "latest")
    learned, changed = ours.state_dict(), read_on.state_dict()
    layers = {
        int(name.split(".")[2])
        for name in learned
        if name.startswith("model.layers.")
        and not torch.equal(learned[name], changed[name])
    }
    assert layers == set(range(17, 30))
    settings = ("--prompt", "The sky is", "--max-new-tokens", "5", "--temperature", "0")
    (text,) = answer(tmp_path, "generate", str(lab.run_dir("calm")), *settings)["texts"]
    assert text["tokens"]
    shutil.rmtree(tmp_path)  # 10 GB
