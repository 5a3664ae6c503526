"""A Llama in a GGUF file as a folder with float32 weights, which `infini-llama import` and `train.init_from` take.

    python scripts/from_gguf.py MODEL.gguf --output FOLDER

It needs the extra `pretrained` (gguf, transformers). Quantized weights are expanded to what they stand for.
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)


def convert(file: Path, output: Path) -> None:
    """Write `output` with weights, configuration and tokenizer.

    Raises:
        SystemExit: it is no GGUF file, no Llama, or scales rotary positions.
    """
    scaling = scaling_of(file)
    if scaling is not None:
        raise SystemExit(
            f"{file} scales rotary positions ({scaling}), which transformers does not read from GGUF; "
            "use the folder that the file was made from."
        )
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32"
    )
    if type(loaded) is not LlamaForCausalLM:
        raise SystemExit(f"{file} is a {type(loaded).__name__}, not a Llama.")
    described = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "transformers_version"):
        described.pop(name, None)
    # GGUF has it as float32: 1e-05, not 9.99…e-06.
    described["rms_norm_eps"] = float(str(np.float32(described["rms_norm_eps"])))
    # transformers 5 does not save a model that it read from GGUF: its weights go into one that it did not.
    model = LlamaForCausalLM(LlamaConfig(**described))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(
        output
    )


def scaling_of(file: Path) -> str | None:
    """What scales rotary positions in a GGUF file; None: nothing does.

    Raises:
        SystemExit: the file cannot be read, or is no GGUF file.
    """
    try:
        read = GGUFReader(file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} cannot be read as GGUF ({error}).") from None
    kind = read.get_field("llama.rope.scaling.type")
    if kind is not None and kind.contents() != "none":
        return f"llama.rope.scaling.type={kind.contents()}"
    for tensor in read.tensors:
        # Llama 3.1 and later have their scaling as a divisor per frequency.
        if tensor.name == "rope_freqs.weight" and (tensor.data != 1).any():
            return tensor.name
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    convert(arguments.file, arguments.output)
