"""Exported folders in other people's programs, run as the pages say. They are no dependencies: a test says what it needs."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from infini_llama.model.llama import Llama
from infini_llama.model.rope import scaled_frequencies

PAGE = Path(__file__).parents[4] / "docs/huggingface.md"
TEXTS = ["the cat sat on a mat", "a dog, and then: the end.", "«größer» 日本語 🙂"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
TASK = """\
task: ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {texts}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def bits_per_byte(model: Llama, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Of whole texts, each behind an end-of-text token, as training reads documents."""
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[0, *tokenizer.encode(text, add_special_tokens=False).ids]])
        with torch.no_grad():
            nats += float(model.loss(ids[:, :-1], ids[:, 1:])[0])
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="needs lm-evaluation-harness: pip install 'lm_eval[hf]'",
)
@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_the_lm_eval_harness_gives_our_figures(export_of, tmp_path, attention):
    folder, model = export_of(attention=attention)
    tokenizer, texts = (
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        tmp_path / "texts.jsonl",
    )
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "ours.yaml").write_text(TASK.format(texts=texts))
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        "--device",
        "cpu",
        "--tasks",
        "ours",
    ]
    command += [
        "--model_args",
        f"pretrained={folder},trust_remote_code=True,max_length=512",
    ]
    command += [
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "results.json"),
    ]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, env=offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.glob("results*.json")
    theirs = json.loads(results.read_text())["results"]["ours"]["bits_per_byte,none"]
    assert theirs == pytest.approx(bits_per_byte(model, tokenizer, TEXTS), rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    "LLAMA_CPP" not in os.environ,
    reason="needs llama.cpp's sources: LLAMA_CPP=its folder",
)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "rope_scaling": LLAMA3}]
)
def test_the_converter_of_llama_cpp_takes_a_softmax_model(export_of, tmp_path, changes):
    """By the program that stands on the page."""
    folder, model = export_of(**changes)
    script, place = tmp_path / "convert.py", Path(os.environ["LLAMA_CPP"])
    (program,) = re.findall(
        r"^```python\n(# convert\.py.*?)^```",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    script.write_text(program)
    command = [
        sys.executable,
        str(script),
        str(place),
        str(folder),
        "--outtype",
        "f32",
        "--outfile",
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "x.gguf")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = "import sys, json; from gguf import GGUFReader; r = GGUFReader(sys.argv[1]); " \
           "print(json.dumps({t.name: t.data.reshape(-1)[:8].tolist() for t in r.tensors})); " \
           "print(json.dumps({n: f.contents() for n, f in r.fields.items() if not n.startswith('GGUF')}))"  # fmt: skip
    paths = os.environ | {"PYTHONPATH": str(place / "gguf-py")}
    result = subprocess.run([sys.executable, "-c", read, str(tmp_path / "x.gguf")], env=paths, capture_output=True,
                          text=True, check=True)  # fmt: skip
    tensors, fields = map(json.loads, result.stdout.splitlines())
    state = model.state_dict()
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    for theirs, ours in (
        pairs | {"blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight"}
    ).items():
        assert tensors[theirs] == state[ours].reshape(-1)[:8].tolist()
    assert ("output.weight" in tensors) == (not model.config.tie_word_embeddings)
    plain, ours = (scaled_frequencies(replace(model.config, rope_scaling=scaling), torch.device("cpu"), torch.float32)[0]
                   for scaling in (None, model.config.rope_scaling))  # fmt: skip
    torch.testing.assert_close(
        torch.tensor(tensors.get("rope_freqs.weight", [1.0] * len(plain))), plain / ours
    )
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == (
        "gpt2",
        "gpt-2",
    )
    assert (
        fields["tokenizer.ggml.eos_token_id"] == 0
        and len(fields["tokenizer.ggml.tokens"]) == model.config.vocab_size
    )
