"""Folders as other programs leave them: transformers and infini-llama load the same model, or the folder is refused by a sentence."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.flows.pipeline import preparation_for
from infini_llama.model.llama import Llama
from infini_llama.tasks.export.importing import open_model
from infini_llama.tasks.storage.hf_folder import open_folder
from infini_llama.tasks.tokenizers.tokenizer import load
from infini_llama.tasks.train.worker.initial_model import load_pretrained

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 700,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
GONE = object()
HUGE = 10**400
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@pytest.fixture
def folder(theirs):
    """folder(change, …): a folder that transformers wrote, with the dataset's tokenizer, after the changes."""

    def make(*changes, **fields):
        path, _ = theirs(**(SIZES | {"num_key_value_heads": 1} | fields))
        for change in changes:
            change(path)
        return path

    return make


def stated(name="config.json", **changes):
    """A change of keys of a JSON file."""

    def change(path):
        file = path / name
        values = (json.loads(file.read_text()) if file.exists() else {}) | changes
        file.write_text(
            json.dumps(
                {key: value for key, value in values.items() if value is not GONE}
            )
        )

    return change


def tensors(change, number=0):
    """A change of the tensors of one file."""

    def changed(path):
        file = sorted(path.glob("*.safetensors"))[number]
        held = load_file(file)
        kept = {name: x for name, x in (held | change(held)).items() if x is not GONE}
        save_file(kept, file, metadata={"format": "pt"})

    return changed


def index(change):
    def changed(path):
        values = json.loads((path / INDEX).read_text())
        (path / INDEX).write_text(
            json.dumps(values | {"weight_map": change(values["weight_map"])})
        )

    return changed


def dangling(name):
    """A file as a copy of the Hub's cache has it, whose links lead out of the copy."""

    def change(path):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(f"../../blobs/{name}")

    return change


def removed(name):
    return lambda path: (path / name).unlink()


def pickled(path):
    torch.save(load_file(path / ONE), path / "pytorch_model.bin")
    (path / ONE).unlink()


def cut_short(path):
    os.truncate(path / ONE, (path / ONE).stat().st_size - 100)


def index_of_one(path):
    stated(INDEX, weight_map=dict.fromkeys(load_file(path / ONE), ONE))(path)


def other_weights(path):
    torch.save(
        {name: 2 * tensor for name, tensor in load_file(path / ONE).items()},
        path / "pytorch_model.bin",
    )
    save_file(
        {name: 3 * tensor for name, tensor in load_file(path / ONE).items()},
        path / "model.fp16.safetensors",
    )
    (path / "model.gguf").write_bytes(b"GGUF")


def own_logits(path, ids):
    model = Llama(open_model(path).config)
    load_pretrained(model, path)
    with torch.no_grad():
        return model.eval()(ids)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"tie_word_embeddings": True}, []),
        ({"tie_word_embeddings": True}, [tensors(lambda held: {HEAD: held[EMBEDDING].clone()})]),
        ({"tie_word_embeddings": True}, [tensors(lambda held: {HEAD: -held[EMBEDDING]})]),
        ({"tie_word_embeddings": True}, [tensors(lambda held: {HEAD: held.pop(EMBEDDING)})]),
        ({"tie_word_embeddings": True}, [tensors(lambda held: {HEAD: held[EMBEDDING].bfloat16()})]),
        ({}, [tensors(lambda held: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})]),
        ({}, [tensors(lambda held: {NORM: held[NORM].double(), EMBEDDING: held[EMBEDDING].half()})]),
        ({"hidden_act": "gelu", "rms_norm_eps": 1e-3}, []),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}, []),
        ({}, [index_of_one]),
        ({}, [other_weights]),
        ({"shard": "20KB"}, []),
        ({}, [stated(pretraining_tp=2, sliding_window=8, use_sliding_window=False, partial_rotary_factor=1.0)]),
        ({}, [stated(pad_token_id=-1, layer_types=["full_attention"] * 2, note="x")]),
        ({}, [stated(rope_parameters=GONE, rope_theta=5e5, rope_scaling=LLAMA3, original_max_position_embeddings=32)]),
        ({}, [stated(rope_parameters=YARN | {"beta_fast": None, "truncate": True})]),
        ({}, [stated(rope_parameters=YARN | {"beta_fast": 0, "beta_slow": 0.0})]),
    ],
)  # fmt: skip
def test_the_same_model_as_in_transformers(folder, fields, changes):
    path = folder(*changes, **fields)
    theirs, ids = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
        torch.randint(0, 700, (2, 60)),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            own_logits(path, ids), theirs(ids).logits, rtol=0, atol=2e-5
        )


@pytest.mark.parametrize(
    ("fields", "change", "words"),
    [
        ({"tie_word_embeddings": True}, tensors(lambda held: {HEAD: torch.ones(710, 16)}), rf"{HEAD}.*\[710, 16\]"),
        ({}, tensors(lambda held: {NORM: held[NORM].to(torch.int8)}), rf"{NORM}.*I8"),
        ({}, tensors(lambda held: {NORM: held[NORM].to(torch.float8_e4m3fn)}), rf"{NORM}.*F8"),
        ({}, tensors(lambda held: {NORM: torch.full([16], torch.nan)}), rf"{NORM}.*finite"),
        ({}, tensors(lambda held: {NORM: torch.full([16], 1e300, dtype=torch.float64)}), rf"{NORM}.*finite"),
        ({}, stated(vocab_size=701), EMBEDDING),
        ({}, stated(num_hidden_layers=10**8), "num_hidden_layers=100000000"),
        ({}, stated(hidden_size=10**12, intermediate_size=10**12), "config.json"),
        ({"shard": "20KB"}, lambda path: shutil.copy(next(path.glob("model-*")), path / ONE), "two sets"),
        ({"shard": "20KB"}, lambda path: (path / INDEX).unlink(), "model-00001-of"),
        ({}, lambda path: (path / ONE).rename(path / "model.fp16.safetensors"), "model.fp16.safetensors"),
        ({}, dangling("config.json"), "config.json is a link"),
        ({"shard": "20KB"}, dangling("model-00001-of-00013.safetensors"), "model-00001-of-00013.safetensors is a link"),
        ({}, stated("adapter_config.json", peft_type="LORA"), "adapter_config.json"),
        ({}, stated(transformers_weights="other.safetensors"), "transformers_weights='other.safetensors'"),
        ({"shard": "20KB"}, index(lambda files: {key: files[key] for key in files if key != NORM}), f"{NORM}.*no file"),
        ({"shard": "20KB"}, index(lambda files: files | {NORM: files[EMBEDDING]}), NORM),
        ({"shard": "20KB"}, index(lambda files: files | {"more": files[NORM]}), "more"),
        ({"shard": "20KB"}, tensors(lambda held: {NORM: torch.ones(16)}), NORM),
        ({}, stated(hidden_act=GONE, hidden_activation="gelu"), "hidden_activation='gelu'"),
        ({}, stated(head_dim=8.0), "head_dim=8.0"),
        ({}, stated(num_key_value_heads=True), "num_key_value_heads=True"),
        ({}, stated(rms_norm_eps=0), "rms_norm_eps=0"),
        ({}, stated(attention_dropout="0.1"), "attention_dropout='0.1'"),
        ({}, stated(sliding_window=8), "sliding_window=8"),
        ({}, stated(layer_types=["full_attention", "sliding_attention"]), "layer_types="),
        ({}, stated(no_rope_layers=4), "no_rope_layers=4"),
        ({}, stated(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        ({}, stated(logits_scaling=8.0), "logits_scaling=8.0"),
        ({}, stated(quantization_config={"quant_method": "gptq"}), "quantization_config=.*gptq"),
        ({}, stated(architectures=["LlamaForSequenceClassification"]), "architectures="),
        ({}, stated(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type='dynamic'"),
        ({}, stated(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling=.*contradicts rope_parameters="),
        ({}, stated(rope_theta=5e5), "rope_theta=500000.0 contradicts 10000.0"),
        ({}, stated(rope_parameters={"rope_type": "default", "rope_theta": HUGE}), "rope_theta=1000"),
        ({}, stated(rope_parameters=YARN | {"rope_theta": 1.0}), "rope_theta=1.0"),
        ({}, stated(rope_parameters=YARN | {"beta_fast": 1, "beta_slow": 32}), "beta_fast=1.0"),
        ({}, stated(rope_parameters=YARN | {"beta_slow": 1e-310}), "config.json"),
        ({}, stated(rope_parameters=YARN | {"attention_factor": [1]}), r"attention_factor=\[1\]"),
        ({}, stated(rope_parameters=YARN | {"factor": HUGE}), "factor=1000"),
        ({}, stated(rms_norm_eps=HUGE), "rms_norm_eps=1000"),
        ({}, stated(hidden_size=2**63), "hidden_size=9223372036854775808"),
        ({}, stated(vocab_size=HUGE), "vocab_size=1000"),
        ({}, stated(head_dim=HUGE), "head_dim=1000"),
        ({}, stated(num_attention_heads=2**31 - 1, head_dim=2**31 - 2, num_key_value_heads=1), "config.json"),
        ({}, stated(rope_parameters=LLAMA3 | {"low_freq_factor": None}), "low_freq_factor=None"),
        ({}, stated(rope_parameters=YARN | {"mscale": 1.0}), "mscale=1.0"),
        ({}, stated(rope_parameters={"full_attention": {"rope_type": "default"}}), "full_attention="),
        ({}, stated(eos_token_id=[0, 700]), r"eos_token_id=\[0, 700\]"),
        ({}, stated("generation_config.json", bos_token_id=-1), r"generation_config.json.*bos_token_id=-1"),
        ({}, stated(pad_token_id=700), "pad_token_id=700"),
        ({"vocab_size": 200}, stated(), "embedding 200 rows"),
        ({}, stated("tokenizer_config.json", added_tokens_decoder={"699": {"content": "<pad>"}}), "'<pad>'.*699"),
        ({}, stated("added_tokens.json", **{"<|endoftext|>": 1}), r"endoftext.*added_tokens.json|added_tokens.json.*endoftext"),
    ],
)  # fmt: skip
def test_what_is_refused_names_key_or_tensor_and_value(folder, fields, change, words):
    path = folder(change, **fields)
    with pytest.raises(PipelineError, match=words) as refused:
        own_logits(path, torch.ones(1, 8, dtype=torch.int64))
    assert isinstance(refused.value, ConfigError | DataError)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ([pickled], ConfigError, "as pickle .pytorch_model.bin., which can run any code"),
        ([cut_short], DataError, "model.safetensors is damaged"),
        ([tensors(lambda _: {UP: GONE})], ConfigError, f"lacks: {UP}"),
        ([tensors(lambda _: {BIAS: torch.zeros(16)})], ConfigError, f"unknown: {BIAS}"),
        ([removed(ONE)], ConfigError, "has neither model.safetensors nor"),
        ([stated(model_type="gpt2")], ConfigError, "model_type='gpt2'"),
        ([removed(ONE), stated(INDEX, weight_map={NORM: "../elsewhere.safetensors"})], DataError, "outside its folder"),
        ([removed(ONE), stated(INDEX, weight_map={NORM: "model-00002-of-00002.safetensors"})], DataError, "model-00002-of-00002.safetensors is missing"),
        ([removed("config.json")], ConfigError, "not a Hugging Face folder"),
    ],
)  # fmt: skip
def test_unsupported_models_are_named_on_import(folder, changes, kind, words):
    path = folder(*changes)
    with pytest.raises(kind, match=words):
        open_model(path)


@pytest.mark.parametrize("weight_map", [[], [ONE], None, "x", {NORM: ["x"]}, {"a": 1}])
def test_a_malformed_index_is_named(folder, weight_map):
    path = folder(stated(INDEX, weight_map=weight_map))
    with pytest.raises(DataError, match=r"model\.safetensors\.index\.json.*weight_map"):
        open_folder(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_parameters", [1]),
        ("rope_parameters", {"rope_type": []}),
        ("rope_parameters", {"rope_theta": []}),
        ("hidden_size", "32"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("vocab_size", None),
        ("max_position_embeddings", []),
        ("rms_norm_eps", {}),
        ("hidden_act", []),
        ("tie_word_embeddings", "no"),
        ("model_type", []),
        ("model_type", "infini_llama"),
    ],
)
def test_a_config_with_wrong_types_is_named(folder, field, value):
    path = folder(stated(**{field: value}))
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_folder(path)


def test_json_nested_beyond_what_python_parses_is_damaged(folder):
    path = folder()
    (path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"config\.json"):
        open_folder(path)


@pytest.mark.parametrize(
    "beside", [["tokenizer.model"], ["vocab.json", "merges.txt"], []]
)
def test_no_tokenizer_is_trained_for_weights_of_another_one(
    folder, built, data, tmp_path, beside
):
    path = folder(lambda path: (path / "tokenizer.json").unlink())
    for name in beside:
        (path / name).write_text("{}")
    run = {
        "train": {"init_from": str(path), "max_steps": 2, "warmup_steps": 0},
        "runtime": {"home": str(tmp_path)},
    }
    config = PipelineConfig.model_validate(run | {"data": data()})
    for attempt in (lambda: open_model(path), lambda: preparation_for(config)):
        with pytest.raises(ConfigError, match=", ".join(beside) or "tokenizer.json"):
            attempt()
    assert not (tmp_path / "datasets").exists()
    home, reference = built
    given = data(tokenizer={"path": str(home / reference.path)})
    assert preparation_for(PipelineConfig.model_validate(run | {"data": given}))


@pytest.mark.skipif(
    not OVERCOMMIT.exists() or OVERCOMMIT.read_text().strip() == "1",
    reason="this machine maps files of any size",
)
def test_a_file_larger_than_the_memory_is_named(folder):
    path = folder(tie_word_embeddings=True)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows, header, end = memory // (4 * SIZES["hidden_size"]), {}, 0
    shapes = {
        name: list(tensor.shape) for name, tensor in load_file(path / ONE).items()
    }
    shapes |= {name: [rows, SIZES["hidden_size"]] for name in (EMBEDDING, HEAD)}
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    begin = json.dumps(header).encode()
    with (path / ONE).open("wb") as file:
        file.write(len(begin).to_bytes(8, "little") + begin)
        file.truncate(8 + len(begin) + end)  # without blocks on the disk
    stated(vocab_size=rows)(path)
    with pytest.raises(ConfigError, match=ONE):
        open_folder(path)


def test_a_head_with_other_values_is_part_of_the_configuration(folder):
    path = folder(
        tensors(lambda held: {HEAD: -held[EMBEDDING]}), tie_word_embeddings=True
    )
    assert open_folder(path).untied and not open_folder(path).config.tie_word_embeddings


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_byte_order_mark_is_read_over(folder, name):
    def marked(path):
        (path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
        (path / name).write_bytes(b"\xef\xbb\xbf" + (path / name).read_bytes())

    path = folder(marked)
    assert open_folder(path).config.vocab_size == SIZES["vocab_size"]
    settings = TokenizerConfig(path=str(path))
    assert load(settings).get_vocab_size() <= SIZES["vocab_size"]
