"""scripts/from_gguf.py: a folder with the function of the file, or a sentence."""

import json

import numpy as np
import pytest

from support.scripts import script

WIDTH, INNER, HEADS, TOKENS = 32, 48, 4, 300
gguf = pytest.importorskip(
    "gguf",
    reason="of the extra `pretrained`; `make pretrained` installs it and runs this",
)


@pytest.fixture(name="script")
def loaded():
    return script("from_gguf")


def write_llama(file, scaling=None, divisors=None):
    """A Llama of one layer, with llama.cpp's names."""
    letters = [chr(256 + number) for number in range(TOKENS - 1)]
    joined = letters[0] + letters[1]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*letters, joined])
    writer.add_token_types([1] * TOKENS)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(0)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    shapes = {
        "token_embd": (TOKENS, WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.ffn_gate": (INNER, WIDTH),
        "blk.0.ffn_up": (INNER, WIDTH),
        "blk.0.ffn_down": (WIDTH, INNER),
    }
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}"] = (WIDTH, WIDTH)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.5, np.float32))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scaling": gguf.RopeScalingType.LINEAR}, "rope.scaling.type=linear"),
        ({"divisors": [1, 1, 8, 32]}, "rope_freqs.weight"),
    ],
)
def test_scaled_positions_are_refused(script, tmp_path, changes, words):
    """transformers would leave the scaling out, and the folder would be another model."""
    file = write_llama(tmp_path / "scaled.gguf", **changes)
    with pytest.raises(SystemExit, match=words):
        script.convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plain_llama_is_converted(script, tmp_path):
    script.convert(
        write_llama(tmp_path / "plain.gguf", divisors=[1] * 4), tmp_path / "out"
    )
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["rope_parameters"]["rope_type"] == "default"
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_file_that_is_no_gguf_is_named(script, tmp_path):
    (tmp_path / "text.gguf").write_text("no weights " * 10)
    for name in ("text.gguf", "missing.gguf"):
        with pytest.raises(SystemExit, match=f"{name} cannot be read as GGUF"):
            script.convert(tmp_path / name, tmp_path / "out")
