"""Does the memory remember? Associative recall over four segments, where only it can know the answer.

    .venv/bin/python benchmarks/recall.py [--seeds 3] [--steps 600]

A row is four segments of 16 tokens. At random places in the first three stand six facts, each one token for a (key, value) pair;
in the fourth stand the six keys, and only what follows them, their values, is scored. Attention inside a segment alone cannot do
better than chance, 1/16. The result, with accuracies at lengths that were never trained, goes to benchmarks/results/recall.json.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, parameter_groups
from infini_llama.model.loss import IGNORE_INDEX

KEYS = VALUES = 16
SEGMENT, FACTS = 16, 6
FILLER, FIRST_FACT = 0, 1
FIRST_QUERY = FIRST_FACT + KEYS * VALUES
FIRST_ANSWER = FIRST_QUERY + KEYS
VOCABULARY = FIRST_ANSWER + VALUES
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"attention": "infini", "memory_update": "linear"},
    "delta": {"attention": "infini", "memory_update": "delta"},
    "delta_bounded": {"attention": "infini", "memory_update": "delta_bounded"},
    "local attention": {"attention": "local"},
    "full attention": {"attention": "softmax"},
}


def rows(
    count: int, segments: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels [count, segments * SEGMENT]; six facts in all segments but the last, their keys in the last."""
    length = segments * SEGMENT

    def some(of: int, taken: int) -> torch.Tensor:
        """Different numbers below `of`, [count, taken], in random order."""
        return torch.rand(count, of, generator=generator).argsort(dim=1)[:, :taken]

    keys = some(KEYS, FACTS)
    values = torch.randint(VALUES, (count, FACTS), generator=generator)
    inputs = torch.full((count, length), FILLER)
    labels = torch.full((count, length), IGNORE_INDEX)
    inputs.scatter_(
        1, some(length - SEGMENT, FACTS), FIRST_FACT + keys * VALUES + values
    )
    asked = length - SEGMENT + some(SEGMENT, FACTS)
    inputs.scatter_(1, asked, FIRST_QUERY + keys)
    labels.scatter_(1, asked, FIRST_ANSWER + values)
    return inputs, labels


@torch.inference_mode()
def accuracy(model: Llama, segments: int, count: int = 256) -> float:
    """Share of right answers over rows that were never trained on."""
    inputs, labels = rows(
        count, segments, torch.Generator().manual_seed(10_000 + segments)
    )
    asked = labels != IGNORE_INDEX
    return (model(inputs)[asked].argmax(dim=-1) == labels[asked]).float().mean().item()


def train(variant: str, seed: int, steps: int) -> tuple[Llama, list[tuple[int, float]]]:
    """A model of two layers after `steps` steps or, before, at 0.995; and its accuracies on the way."""
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {
        "num_key_value_heads": 2,
        "max_position_embeddings": 4 * SEGMENT,
        "segment_length": SEGMENT,
    }
    config = LlamaConfig(
        VOCABULARY,
        **shape,
        **VARIANTS[variant],
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = Llama(config)
    groups = parameter_groups(model, weight_decay=0.1)
    for group in groups:
        group["peak"] = group["lr"] = 0.03 if group["name"] == "gates" else 3e-3
    optimizer = torch.optim.AdamW(groups)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, (step + 1) / 100)
        total, count = model.loss(*rows(32, 4, generator))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            curve.append((step + 1, accuracy(model, 4)))
            if curve[-1][1] >= 0.995:
                break
    return model, curve


def measure(variant: str, seed: int, steps: int) -> dict:
    started = time.process_time()
    model, curve = train(variant, seed, steps)
    seconds = time.process_time() - started
    result = {"variant": variant, "seed": seed, "cpu_seconds": seconds, "curve": curve}
    result["accuracy"] = {
        segments: accuracy(model, segments) for segments in (4, 8, 16, 32)
    }
    if model.config.attention == "infini":
        result["gates"] = [
            parameter.sigmoid().tolist()
            for name, parameter in model.named_parameters()
            if name.endswith(".gate")
        ]
        model.use_memory(False)
        result["accuracy without memory"] = accuracy(model, 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for seed in range(options.seeds):
        for variant in VARIANTS:
            results.append(measure(variant, seed, options.steps))
            found = results[-1]
            lengths = ", ".join(
                f"{segments} segments {value:.3f}"
                for segments, value in found["accuracy"].items()
            )
            off = found.get("accuracy without memory")
            print(
                f"{variant:<16} seed {seed}: {lengths}"
                + (f"; memory off {off:.3f}" if off is not None else "")
                + f"; {found['curve'][-1][0]} steps, {found['cpu_seconds']:.0f} s of one core",
                flush=True,
            )
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    stored = {
        "machine": machine,
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "chance": 1 / VALUES,
    }
    target = Path(__file__).with_name("results") / "recall.json"
    target.write_text(
        json.dumps(stored | {"results": results}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
