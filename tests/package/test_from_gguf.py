"""scripts/from_gguf.py: a folder with the function of the file, or a sentence."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from infini_llama.tasks.export.importing import open_model
from infini_llama.tasks.storage.hf_folder import tokenizer_of
from support.scripts import script

WIDTH, INNER, HEADS, TOKENS = 32, 48, 4, 257
gguf = pytest.importorskip(
    "gguf",
    reason="of the extra `pretrained`; `make pretrained` installs it and runs this",
)


@pytest.fixture(name="script")
def loaded():
    return script("from_gguf")


def write_llama(
    file, scaling=None, divisors=None, architecture="llama", pre="smollm", other=None
):
    """A Llama of one layer, with llama.cpp's names, and perhaps another tensor."""
    letters = sorted(ByteLevel.alphabet())
    joined = letters[0] + letters[1]
    writer = gguf.GGUFWriter(str(file), architecture)
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
    writer.add_tokenizer_pre(pre)
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
    if other is not None:
        shapes[other] = (WIDTH,)
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
        ({"architecture": "qwen2"}, "architecture qwen2"),
        ({"other": "blk.0.ffn_gate_inp"}, "ffn_gate_inp.weight, which no Llama"),
        ({"other": "blk.0.attn_q_norm"}, "attn_q_norm.weight, which no Llama"),
        ({"pre": "unheard-of"}, "by the rule unheard-of"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(script, tmp_path, changes, words):
    """The folder would be another model."""
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


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["ĊĊ", "1", "2"]),
        ("gpt-2", ["Ċ", "Ċ", "12"]),
        ("llama-bpe", ["ĊĊ", "12"]),
    ],
)
def test_texts_are_cut_as_the_file_says(script, tmp_path, pre, pieces):
    script.convert(write_llama(tmp_path / "plain.gguf", pre=pre), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("\n\n12")
    assert [piece for piece, _ in cut] == pieces


def test_a_converted_llama_is_imported(script, tmp_path):
    """transformers gives it a token that the embedding has no row for."""
    script.convert(write_llama(tmp_path / "plain.gguf"), tmp_path / "out")
    folder = open_model(tmp_path / "out")
    assert tokenizer_of(folder).get_vocab_size() == folder.config.vocab_size == TOKENS


def test_a_file_that_is_no_gguf_is_named(script, tmp_path):
    (tmp_path / "text.gguf").write_text("no weights " * 10)
    for name in ("text.gguf", "missing.gguf"):
        with pytest.raises(SystemExit, match=f"{name} cannot be read as GGUF"):
            script.convert(tmp_path / name, tmp_path / "out")
