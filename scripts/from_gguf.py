"""A Llama in a GGUF file as a folder with float32 weights, which `infini-llama import` and `train.init_from` take.

    python scripts/from_gguf.py MODEL.gguf --output FOLDER

It needs the extra `pretrained` (gguf, transformers). Quantized weights are expanded to what they stand for.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# llama.cpp's names of the tensors that a Llama has; the last one scales positions.
TENSOR = re.compile(
    r"(token_embd|output|output_norm"
    r"|blk\.\d+\.(attn_norm|attn_[qkv]|attn_output|ffn_norm|ffn_gate|ffn_up|ffn_down)"
    r"|rope_freqs)\.weight"
)
# Names of rules by which a text is cut before its pieces are encoded (tokenizer.ggml.pre). These cut off
# each digit, then cut as GPT-2 does; transformers does not know them.
DIGITS_ALONE = {
    "codeshell",
    "command-r",
    "exaone",
    "minerva-7b",
    "refact",
    "smollm",
    "starcoder",
}
AS_GPT2 = {"default", "gpt-2"}


def convert(file: Path, output: Path) -> None:
    """Write `output` with weights, configuration and tokenizer.

    Raises:
        SystemExit: it is no GGUF file or no Llama, or has what transformers does not read.
    """
    read = opened(file)
    refuse_other_models(file, read)
    tokenizer = tokenizer_of(file, read)
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32"
    )
    described = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "transformers_version"):
        described.pop(name, None)
    # GGUF has it as float32: 1e-05, not 9.99…e-06.
    described["rms_norm_eps"] = float(str(np.float32(described["rms_norm_eps"])))
    # transformers 5 does not save a model that it read from GGUF: its weights go into one that it did not.
    model = LlamaForCausalLM(LlamaConfig(**described))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if value_of(read, "tokenizer.ggml.model") == "gpt2":
        keep_tokens_of_file(file, read, output)


def opened(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} cannot be read as GGUF ({error}).") from None


def value_of(read: GGUFReader, key: str) -> Any:
    field = read.get_field(key)
    return None if field is None else field.contents()


def refuse_other_models(file: Path, read: GGUFReader) -> None:
    """Refuse what is no Llama, or a Llama with scaled positions: transformers would leave out what it does not know."""
    architecture = value_of(read, "general.architecture")
    if architecture != "llama":
        raise SystemExit(f"{file} has the architecture {architecture}, not llama.")
    for tensor in read.tensors:
        if not TENSOR.fullmatch(tensor.name):
            raise SystemExit(f"{file} has {tensor.name}, which no Llama has.")
    kind = value_of(read, "llama.rope.scaling.type")
    scaling = None if kind in (None, "none") else f"llama.rope.scaling.type={kind}"
    for tensor in read.tensors:
        # Llama 3.1 and later have their scaling as a divisor per frequency.
        if tensor.name == "rope_freqs.weight" and (tensor.data != 1).any():
            scaling = tensor.name
    if scaling is not None:
        raise SystemExit(
            f"{file} scales rotary positions ({scaling}), which transformers does not read from GGUF; "
            "use the folder that the file was made from."
        )


def tokenizer_of(file: Path, read: GGUFReader) -> PreTrainedTokenizerFast:
    """The file's tokenizer, which cuts texts as the file says."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if value_of(read, "tokenizer.ggml.model") != "gpt2":
        return tokenizer
    rule = value_of(read, "tokenizer.ggml.pre")
    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule in DIGITS_ALONE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, as_gpt2]
        )
    elif rule not in AS_GPT2 and isinstance(
        tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel
    ):  # transformers' own fallback
        raise SystemExit(
            f"{file} cuts texts by the rule {rule} (tokenizer.ggml.pre), which transformers does not know; "
            "use the folder that the file was made from."
        )
    return tokenizer


def keep_tokens_of_file(file: Path, read: GGUFReader, output: Path) -> None:
    """Remove special tokens that transformers has added, and compare the others with the file's."""
    tokens = value_of(read, "tokenizer.ggml.tokens")
    path = output / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    added = [token for token in described["added_tokens"] if token["id"] < len(tokens)]
    described["added_tokens"] = added
    ids = described["model"]["vocab"] | {
        token["content"]: token["id"] for token in added
    }
    if ids != {token: number for number, token in enumerate(tokens)}:
        raise SystemExit(f"{file}: transformers reads other tokens than the file has.")
    path.write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = output / name
        if path.exists():
            stated = json.loads(path.read_text(encoding="utf-8"))
            kept = {
                key: value
                for key, value in stated.items()
                if not (isinstance(value, str) and key.endswith("_token"))
                or value in ids
            }
            path.write_text(json.dumps(kept, indent=2), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    convert(arguments.file, arguments.output)
