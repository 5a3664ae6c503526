"""A text of a million tokens through the tiny Infini-Llama, piece by piece: memory and speed on the way.

    .venv/bin/python benchmarks/streaming.py [--tokens 1000000] [--output benchmarks/results/streaming.json]

Random weights and tokens, the architecture of configs/tiny_infini.yaml, pieces of 4,096 tokens, one thread. Reported after 1,000
tokens and each tenfold: the bytes of the model's states, the process's peak resident size, and microseconds a token (of the
process's own time) since the report before.
"""

import argparse
import json
import os
import platform
import resource
import time
from pathlib import Path

import torch
import yaml

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, States
from infini_llama.model.memory import Memory

PIECE, VOCABULARY = 4096, 4096


def tiny() -> LlamaConfig:
    fields = yaml.safe_load(
        (Path(__file__).parents[1] / "configs" / "tiny_infini.yaml").read_text(
            encoding="utf-8"
        )
    )
    model = fields["model"]
    model.setdefault("num_key_value_heads", model["num_attention_heads"])
    return LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **model)


def size_in_bytes(states: States) -> int:
    return sum(
        tensor.nbytes
        for state in states.layers
        for value in vars(state).values()
        for tensor in (value if isinstance(value, Memory) else (value,))
        if isinstance(tensor, torch.Tensor)
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results") / "streaming.json",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(tiny()).eval()
    states = model.new_states(1, capacity=0)
    reports, report_at, read = [], 1000, 0
    before, started = 0, time.process_time()
    while read < options.tokens:
        count = min(PIECE, report_at - read, options.tokens - read)
        hidden = model.read(torch.randint(VOCABULARY, (1, count)), states)
        read += count
        if read in (report_at, options.tokens):
            now = time.process_time()
            assert hidden.isfinite().all()
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            speed = (now - started) / (read - before) * 1e6
            state = size_in_bytes(states)
            reports.append(
                {
                    "tokens": read,
                    "state": state,
                    "resident": resident,
                    "us_a_token": speed,
                }
            )
            print(
                f"{read:>9,} tokens: states {state:,} bytes, resident {resident / 1e6:.0f} MB, {speed:.0f} us a token",
                flush=True,
            )
            before, started, report_at = read, now, report_at * 10
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    stored = {"machine": machine, "torch": torch.__version__, "reports": reports}
    options.output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
