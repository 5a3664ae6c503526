"""What a pretrained Llama can do for long texts without a memory: does it find a number, and what does one more token cost?

    python benchmarks/pretrained_alternatives.py models/SmolLM2-135M-Instruct --run workspace/runs/NAME --boundaries 8 64 128 512

Methods:
    full: the original folder, with full attention.
    yarn: the same weights with YaRN (Peng et al. 2023, arXiv 2309.00071), not trained further. `--factors cover` is the smallest whole
        factor by which the original context covers the text; a text that it covers already is not asked again.
    window: the same weights in transformers' MistralForCausalLM with `sliding_window`.
    memory: the run.

passkey: the texts of benchmarks/pretrained_memory.py with the repeated filler. Each is read in pieces, with keys and values kept.
`read_seconds` and `read_tokens` are those of the text before the segment or token that the answer is predicted from.

cost: decoding a token after `--lengths` tokens, for which states are filled with random numbers: weights, keys and values in bf16, M and z
in fp32. `state_bytes` is the size of what all layers keep, the new token's keys and values included. Where that is more than
`--state-gib`, layers share the buffers of as many layers as fit, and `layers_in_memory` is less than `layers`: each layer still reads as
many bytes as with buffers of its own. A run's figure is the mean over a segment, in which it writes to its memory once. A window is
transformers' code and the others are the product's, so small differences between them are not those of the methods. YaRN costs
what full attention does.

Threads that wait for each other make every product slow on a machine that is not quiet: there, use `--threads 1`. Cases are in
benchmarks/results/pretrained_alternatives.jsonl. The same command continues where it was. `--summary` prints the table.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import transformers
from pretrained_memory import asked_in, opened, with_fields, with_segments
from stored_rows import CaseLines, about
from streaming import size_in_bytes
from tokenizers import Tokenizer
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from infini_llama.model import hf
from infini_llama.model.llama import Llama, States
from infini_llama.model.rope import rotary
from infini_llama.tasks.evaluate.passkey import Asked, begin, right_tokens
from infini_llama.tasks.preprocess.sources.passkey import FILLER

RESULTS = Path(__file__).parent / "results" / "pretrained_alternatives.jsonl"
METHODS = ("full", "yarn", "window", "memory")
KINDS = ("passkey", "cost")
COVER = "cover"
OF_COST = ("processor", "threads")  # of the machine
WINDOW_PIECE = 512  # tokens: the mask of a piece has as many rows, and as many columns beside the window


class SlidingWindow:
    """A Llama's weights with a sliding window, in transformers, and of a Llama's methods those that reading and decoding use.

    A token attends to itself and the `window` - 1 tokens before it.
    """

    def __init__(self, llama: Llama, window: int) -> None:
        fields = hf.config_to_hf(llama.config)
        del (
            fields["architectures"],
            fields["model_type"],
            fields["rope_theta"],
            fields["rope_scaling"],
        )
        self.config, self.window = llama.config, window
        self.theirs: Any = MistralForCausalLM(
            MistralConfig(**fields, sliding_window=window)
        )
        self.theirs.set_attn_implementation("sdpa")
        self.theirs.load_state_dict(llama.state_dict())
        self.theirs.eval().to(llama.lm_head.weight)
        self.lm_head = self.logits = self.theirs.lm_head

    def uses_memory(self) -> bool:
        return False

    def new_states(self, batch: int, capacity: int) -> DynamicCache:
        return DynamicCache(config=self.theirs.config)

    def read(self, input_ids: torch.Tensor, states: DynamicCache) -> torch.Tensor:
        """As `Llama.read`."""
        pieces = input_ids.split(WINDOW_PIECE, dim=1)
        # by position: the argument's name differs between versions
        return torch.cat(
            [
                self.theirs.model(piece, None, None, states).last_hidden_state
                for piece in pieces
            ],
            dim=1,
        )


def with_yarn(model: Llama, factor: int) -> Llama:
    """The same weights with positions for `factor` times the original context."""
    if model.config.rope_scaling is not None:
        raise SystemExit(
            f"the folder has rope_scaling={model.config.rope_scaling} already; leave out --methods yarn"
        )
    trained = model.config.max_position_embeddings
    yarn = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": trained,
    }
    return with_fields(model, rope_scaling=yarn)


def least_factor(model: Llama, asked: Asked) -> int:
    """The smallest whole factor by which the original context covers text and answer."""
    return math.ceil(
        (asked.length + len(asked.answer)) / model.config.max_position_embeddings
    )


def passkey(model: Any, asked: Asked) -> dict[str, Any]:
    """Whether the number is found, and the time of reading up to the question's last token or segment."""
    started, cpu = time.perf_counter(), time.process_time()
    begun = begin(model, asked)
    read_seconds = time.perf_counter() - started
    right = right_tokens(model, begun)
    return {
        "tokens": asked.length,
        "found": all(right),
        "right_tokens": sum(right) / len(right),
        "read_tokens": asked.length - len(begun.rest),
        "read_seconds": round(read_seconds, 3),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }


@dataclass(frozen=True)
class Decoding:
    """Decoding of one more token at a time.

    Attributes:
        step: decode a token; returns its logits.
        state_bytes: of all layers.
        layers_in_memory: layers with buffers of their own.
        steps: tokens of one measurement.
    """

    step: Callable[[], torch.Tensor]
    state_bytes: int
    layers_in_memory: int
    steps: int = 1


def in_bf16(model: Llama) -> Llama:
    """A copy with weights in bf16 and gates in fp32, as an export has them."""
    copy = deepcopy(model).to(torch.bfloat16)
    for number, attention in copy.memory_layers().items():
        attention.gate.data = model.memory_layers()[number].gate.data.clone()
    return copy


def first_token(model: Any) -> torch.Tensor:
    return torch.zeros(1, 1, dtype=torch.long, device=model.lm_head.weight.device)


def full_decoding(model: Llama, tokens: int, most_bytes: float) -> Decoding:
    """Decoding after `tokens` tokens with full attention; buffers of keys and values take at most `most_bytes`, or are one layer's."""
    layers: list[Any] = [*model.model.layers]
    weight, token = model.lm_head.weight, first_token(model)
    tables = rotary(
        torch.arange(tokens + 1, device=weight.device), model.config, weight.dtype
    )
    buffers = [layers[0].self_attn.new_state(1, tokens + 1, weight.dtype)]
    size = size_in_bytes(States(tables, buffers))
    count = max(1, min(len(layers), int(most_bytes // size)))
    buffers += [
        layer.self_attn.new_state(1, tokens + 1, weight.dtype)
        for layer in layers[1:count]
    ]
    for buffer in buffers:
        buffer.k.normal_()
        buffer.v.normal_()

    def step() -> torch.Tensor:
        x = model.model.embed_tokens(token)
        for layer, buffer in zip(layers, cycle(buffers), strict=False):
            buffer.filled = [tokens]
            x = layer.read(x, tables, buffer, None)
        return model.logits(model.model.norm(x))[:, -1]

    return Decoding(step, size * len(layers), count)


def window_decoding(model: SlidingWindow, tokens: int) -> Decoding:
    """Decoding after `tokens` tokens with a sliding window; transformers keeps one token fewer than the next one attends to."""
    states, weight, token = (
        model.new_states(1, 0),
        model.lm_head.weight,
        first_token(model),
    )
    attended = (
        1,
        model.config.num_key_value_heads,
        min(tokens + 1, model.window),
        model.config.head_size,
    )
    size = 0
    kept: list[Any] = states.layers
    for number, layer in enumerate(kept):
        k, v = (
            torch.randn(attended, dtype=weight.dtype, device=weight.device)
            for _ in range(2)
        )
        size += k.nbytes + v.nbytes
        states.update(k[:, :, 1:], v[:, :, 1:], number)
        layer.cumulative_length = tokens
    return Decoding(
        lambda: model.logits(model.read(token, states))[:, -1], size, len(kept)
    )


def memory_decoding(model: Llama, tokens: int) -> Decoding:
    """Decoding after `tokens` tokens with Infini-attention, a segment at a time."""
    states, token, size = (
        model.new_states(1, 0),
        first_token(model)[0],
        model.config.segment_length,
    )
    for state in states.layers:
        named: dict[str, Any] = vars(state)
        for tensor in (
            state.k,
            state.v,
            *([named["plain_k"]] if "plain_k" in named else []),
        ):
            tensor.normal_()
        for tensor in named.get("memory", ()):
            tensor.uniform_()  # z is a sum of positive terms
        state.filled, named["segments"] = [tokens % size], [tokens // size]
    return Decoding(
        lambda: model.decode(token, states),
        size_in_bytes(states),
        len(states.layers),
        size,
    )


@torch.inference_mode()
def cost(
    model: Any, method: str, tokens: int, repetitions: int, most_bytes: float
) -> dict[str, Any]:
    """Seconds per token of each repetition, and the size of the state."""
    if method == "window":
        decoding = window_decoding(model, tokens)
    elif method == "memory":
        decoding = memory_decoding(model, tokens)
    else:
        decoding = full_decoding(model, tokens, most_bytes)
    if not decoding.step().isfinite().all():
        raise RuntimeError(f"{method} after {tokens} tokens: logits are not finite")
    wall: list[float] = []
    cpu: list[float] = []
    for repetition in range(repetitions + 1):  # the first warms up
        started, started_cpu = time.perf_counter(), time.process_time()
        for _ in range(decoding.steps):
            decoding.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if repetition:
            wall.append((time.perf_counter() - started) / decoding.steps)
            cpu.append((time.process_time() - started_cpu) / decoding.steps)
    return {
        "state_bytes": decoding.state_bytes,
        "layers": model.config.num_hidden_layers,
        "layers_in_memory": decoding.layers_in_memory,
        "steps": decoding.steps,
        "median_seconds": statistics.median(wall),
        "seconds": wall,
        "cpu_seconds": cpu,
    }


def machine_facts() -> dict[str, Any]:
    facts = about() | {
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    return facts | (
        {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    )


def variants(options: argparse.Namespace, method: str) -> list[dict[str, Any]]:
    """The method with each value of its setting."""
    settings = {
        "yarn": ("factor", options.factors),
        "window": ("window", options.windows),
    }
    if method not in settings:
        return [{"method": method}]
    name, values = settings[method]
    return [{"method": method, name: value} for value in values]


def numbers(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for boundaries in options.boundaries:
        for number in range(options.samples):
            cell = {
                "segment_length": options.segment_length,
                "boundaries": boundaries,
                "filler": "repeated",
            }
            yield cell | {"number": number}


def measure_passkeys(
    options: argparse.Namespace,
    lines: CaseLines,
    model: Llama,
    tokenizer: Tokenizer,
    fields: dict[str, Any],
) -> None:
    """All numbers of one variant that are not stored yet; `fields` name it."""
    filler = tokenizer.encode(FILLER, add_special_tokens=False).ids
    variant: Any = None
    factor = 0
    for number in numbers(options):
        case = fields | {"precision": options.precision} | number
        if case in lines:
            continue
        asked, measured = asked_in(number, tokenizer, filler), {}
        if fields["method"] == "yarn":
            least = least_factor(model, asked)
            if fields["factor"] == COVER and least == 1:
                continue
            wanted = least if fields["factor"] == COVER else int(fields["factor"])
            if wanted != factor:
                variant, factor = with_yarn(model, wanted), wanted
            measured = {"rope_factor": factor}
        elif variant is None and fields["method"] == "window":
            variant = SlidingWindow(model, fields["window"])
        elif variant is None:
            variant = with_segments(model, options.segment_length)
        with torch.autocast(
            model.lm_head.weight.device.type,
            torch.bfloat16,
            enabled=options.precision == "bf16",
        ):
            measured |= passkey(variant, asked)
        lines.add(case, measured | machine_facts() | {"load": os.getloadavg()[0]})


def measure_costs(
    options: argparse.Namespace,
    lines: CaseLines,
    model: Llama,
    method: str,
    fields: dict[str, Any],
) -> None:
    """All lengths of one variant that are not stored yet, once per processor."""
    variant: Any = None
    facts = machine_facts()
    size = {"segment_length": options.segment_length} if method == "memory" else {}
    for tokens in options.lengths:
        case = (
            fields
            | size
            | {
                "precision": "bf16",
                "tokens": tokens,
                **{name: facts[name] for name in OF_COST},
            }
        )
        if case in lines:
            continue
        if variant is None:
            half = in_bf16(with_segments(model, options.segment_length))
            variant = (
                SlidingWindow(half, fields["window"]) if method == "window" else half
            )
        measured = cost(
            variant, method, tokens, options.repetitions, options.state_gib * 2**30
        )
        lines.add(case, measured | facts | {"load": os.getloadavg()[0]})


def measure(options: argparse.Namespace) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    lines = CaseLines(RESULTS)
    of_run = [
        method for method in options.methods if method == "memory" and options.run
    ]
    originals = [method for method in options.methods if method != "memory"]
    for place, methods in ((options.original, originals), (options.run, of_run)):
        if not methods:
            continue
        model, tokenizer, named = opened(place, options.checkpoint)
        if methods is originals and model.config.attention != "softmax":
            raise SystemExit(
                f"{place}: attention={model.config.attention}; give the folder of the original"
            )
        for method in methods:
            for variant in variants(options, method):
                if "passkey" in options.kinds:
                    measure_passkeys(
                        options,
                        lines,
                        model,
                        tokenizer,
                        named | {"kind": "passkey"} | variant,
                    )
                if "cost" in options.kinds and method != "yarn":
                    measure_costs(
                        options,
                        lines,
                        model,
                        method,
                        named | {"kind": "cost"} | variant,
                    )


def summary() -> list[dict[str, Any]]:
    """A row per cell: numbers found of those asked and the time to read a token, or the cost of one more token."""
    names = (
        "kind",
        "model",
        "step",
        "digest",
        "method",
        "factor",
        "window",
        "precision",
        "segment_length",
        "boundaries",
    )
    cells: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    rows = []
    for line in CaseLines(RESULTS).read():
        if line["kind"] == "passkey":
            cells[tuple(line.get(name) for name in names)].append(line)
        else:
            copied = (
                *names,
                "tokens",
                "state_bytes",
                "layers",
                "layers_in_memory",
                *OF_COST,
            )
            rows.append(
                {name: line[name] for name in copied if name in line}
                | {"ms": 1000 * line["median_seconds"]}
            )
    for key, lines in cells.items():
        row = {
            name: value
            for name, value in zip(names, key, strict=True)
            if value is not None
        }
        row |= {"asked": len(lines), "found": sum(line["found"] for line in lines)}
        row["right_tokens"] = statistics.mean(line["right_tokens"] for line in lines)
        row["tokens"] = max(line["tokens"] for line in lines)
        if "factor" in row:
            row["rope_factors"] = sorted({line["rope_factor"] for line in lines})
        row["read_ms"] = statistics.median(
            1000 * line["read_seconds"] / line["read_tokens"] for line in lines
        )
        rows.append(row)
    return rows


def yarn_factor(word: str) -> str | int:
    """An argument of --factors: COVER or a whole number above 1."""
    if word != COVER and not (word.isdecimal() and int(word) > 1):
        raise argparse.ArgumentTypeError(
            f"{word!r} is neither {COVER} nor a whole number above 1"
        )
    return COVER if word == COVER else int(word)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "original",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="of the original, from Hugging Face",
    )
    parser.add_argument(
        "--run", type=Path, help="of the method memory, which is left out without it"
    )
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--segment-length", type=int, default=64)
    parser.add_argument("--boundaries", type=int, nargs="+", default=[8, 64, 128, 512])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--factors", type=yarn_factor, nargs="+", default=[COVER])
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 512])
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="of products, of passkey cases",
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2_048, 32_768, 131_072, 1_048_576]
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument(
        "--state-gib",
        type=float,
        default=4.0,
        help="most memory of keys and values of the cost cases",
    )
    parser.add_argument("--summary", action="store_true")
    return parser


if __name__ == "__main__":
    given = parser().parse_args()
    if given.original:
        measure(given)
    if given.summary:
        for each in summary():
            print(json.dumps(each))
