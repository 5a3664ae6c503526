"""A pretrained Llama with a memory: does it find a number by distance, and does it read text as well as before?

    python benchmarks/pretrained_memory.py workspace/runs/NAME … --segment-lengths 64 512 --boundaries 1 8 64 --text 'held-out/*.txt'

Models are runs, or folders of Hugging Face (the original, with full attention). Each number and each text is a case, which is stored as it
ends: the same command goes on where it was, beside other work. Cases are in benchmarks/results/pretrained_memory.jsonl, of one checkpoint
under its digest. `--summary` prints the table of all that is stored.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from random import Random
from typing import Any

import torch
from stored_rows import CaseLines
from tokenizers import Tokenizer

from infini_llama.model.llama import Llama
from infini_llama.tasks.evaluate.passkey import (
    Asked,
    Begun,
    ask_across,
    begin,
    greedy_tokens,
    right_tokens,
)
from infini_llama.tasks.preprocess.sources.passkey import FILLER, FORMS
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.load import load_run
from infini_llama.tasks.storage.artifacts import read_manifest
from infini_llama.tasks.storage.hf_folder import open_folder, tokenizer_of
from infini_llama.tasks.tokenizers.encoder import TextEncoder
from infini_llama.tasks.train.worker.initial_model import load_pretrained

RESULTS = Path(__file__).parent / "results" / "pretrained_memory.jsonl"
ROW_SEGMENTS = 8
FILLER_TOKENS = 100_000


def opened(place: Path, checkpoint: str) -> tuple[Llama, Tokenizer, dict[str, object]]:
    """A model on a GPU if there is one, its tokenizer, and what its cases are stored under."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (place / "lineage.json").exists():
        model, tokenizer, chosen = load_run(place, checkpoint)
        step, digest = (
            checkpoints.step_of(chosen),
            read_manifest(chosen, checkpoints.KIND).digest,
        )
        return (
            model.eval().to(device),
            tokenizer,
            {"model": place.name, "step": step, "digest": digest},
        )
    folder = open_folder(place)
    model = Llama(folder.config)
    load_pretrained(model, place)
    return (
        model.eval().to(device),
        tokenizer_of(folder),
        {"model": place.name, "step": 0, "digest": folder.digest()},
    )


def with_segments(model: Llama, segment_length: int) -> Llama:
    """The same weights with segments of another length; a model with full attention is as it is."""
    return (
        model
        if model.config.attention == "softmax"
        else with_fields(model, segment_length=segment_length)
    )


def with_fields(model: Llama, **fields: Any) -> Llama:
    """The same weights under a configuration with other values of these fields; the model itself where nothing changes."""
    config = replace(model.config, **fields)
    if config == model.config:
        return model
    other = Llama(config)
    other.load_state_dict(model.state_dict())
    return other.eval().to(model.lm_head.weight.device)


def asked_in(case: dict[str, Any], tokenizer: Tokenizer, filler: list[int]) -> Asked:
    """The text of a case, which depends on nothing but the case, the tokenizer and the filler."""
    random = Random(
        f"{case['filler']}-{case['segment_length']}-{case['boundaries']}-{case['number']}"
    )
    return ask_across(
        TextEncoder(tokenizer, True),
        case["segment_length"],
        case["boundaries"],
        FORMS["passkey"](random),
        random,
        filler,
    )


def passkey(model: Llama, asked: Asked, before: Begun | None) -> tuple[dict, Begun]:
    """One number: found with the memory and without, and what is answered from the memory of the text before."""
    mine = begin(model, asked)
    right = right_tokens(model, mine)
    result = {
        "tokens": asked.length,
        "found": all(right),
        "right_tokens": sum(right) / len(right),
    }
    if model.uses_memory():
        model.use_memory(False)
        result["found_without_memory"] = all(right_tokens(model, begin(model, asked)))
        model.use_memory(True)
        if before is not None and len(before.asked.answer) == len(asked.answer):
            written = greedy_tokens(
                model, mine.rest, before.states, len(asked.answer), asked.vocab_size
            )
            result |= {
                "swapped_own": written == asked.answer,
                "swapped_other": written == before.asked.answer,
            }
    return result, mine


@torch.inference_mode()
def text(model: Llama, ids: list[int], segment_length: int) -> dict:
    """Nats per token of a text in rows of ROW_SEGMENTS segments, by segment, with and without the memory."""
    size = ROW_SEGMENTS * segment_length
    result: dict[str, object] = {}
    memory = model.uses_memory()  # not while it is switched off
    for name in ("memory", "no_memory") if memory else ("memory",):
        if memory:
            model.use_memory(name == "memory")
        sums, counts = [0.0] * ROW_SEGMENTS, [0] * ROW_SEGMENTS
        for start in range(0, len(ids) - 1, size):
            row = torch.tensor(
                [ids[start : start + size + 1]], device=model.lm_head.weight.device
            )
            losses = torch.nn.functional.cross_entropy(
                model(row[:, :-1])[0].float(), row[0, 1:], reduction="none"
            )
            for segment, part in enumerate(losses.split(segment_length)):
                sums[segment] += part.sum().item()
                counts[segment] += len(part)
        result |= {f"{name}_nats": sums, "targets": counts}
    if memory:
        model.use_memory(True)
    return result


def cases(options: argparse.Namespace) -> Iterator[dict]:
    for segment_length in options.segment_lengths:
        for boundaries in options.boundaries:
            for filler in options.fillers:
                for number in range(options.samples):
                    about = {
                        "segment_length": segment_length,
                        "boundaries": boundaries,
                        "filler": filler,
                    }
                    yield {"kind": "passkey", **about, "number": number}
        for file in sorted(file for pattern in options.text for file in glob(pattern)):
            yield {
                "kind": "text",
                "segment_length": segment_length,
                "text": Path(file).name,
                "file": file,
            }


def measure(options: argparse.Namespace) -> None:
    lines = CaseLines(RESULTS)
    for place in options.models:
        model, tokenizer, about = opened(place, options.checkpoint)
        about |= {"precision": "bf16"} if options.precision == "bf16" else {}
        prose = [
            Path(file).read_text()
            for pattern in options.text
            for file in sorted(glob(pattern))
        ]
        tokens = {"repeated": tokenizer.encode(FILLER, add_special_tokens=False).ids}
        if prose:
            tokens["text"] = tokenizer.encode(
                " ".join(prose), add_special_tokens=False
            ).ids[:FILLER_TOKENS]
        of_length, before, cell = model, None, None
        for case in cases(options):
            fields = about | {
                name: value for name, value in case.items() if name != "file"
            }
            if fields in lines:
                continue
            if of_length.config.segment_length != case["segment_length"]:
                of_length = with_segments(model, case["segment_length"])
            if cell != (
                now := tuple(
                    case.get(name)
                    for name in ("segment_length", "boundaries", "filler")
                )
            ):
                before, cell = None, now
            started = time.process_time()
            with torch.autocast(
                model.lm_head.weight.device.type,
                torch.bfloat16,
                enabled=options.precision == "bf16",
            ):
                if case["kind"] == "passkey":
                    result, before = passkey(
                        of_length,
                        asked_in(case, tokenizer, tokens[case["filler"]]),
                        before,
                    )
                else:
                    ids = tokenizer.encode(
                        Path(case["file"]).read_text(), add_special_tokens=False
                    ).ids
                    result = text(of_length, ids, case["segment_length"])
            lines.add(
                fields,
                result | {"cpu_seconds": round(time.process_time() - started, 2)},
            )


def summary() -> list[dict]:
    """A row per cell: numbers found of those asked, or nats per token of all texts."""
    cells: dict[tuple, list[dict]] = defaultdict(list)
    for line in CaseLines(RESULTS).read():
        key = tuple(
            line.get(name)
            for name in (
                "model",
                "step",
                "kind",
                "segment_length",
                "boundaries",
                "filler",
            )
        )
        cells[key].append(line)
    rows = []
    for (model, step, kind, segment_length, boundaries, filler), lines in sorted(
        cells.items(), key=str
    ):
        row = {"model": model, "step": step, "segment_length": segment_length}
        if kind == "passkey":
            row |= {"boundaries": boundaries, "filler": filler, "asked": len(lines)}
            names = ("found", "found_without_memory", "swapped_own", "swapped_other")
            row |= {
                name: sum(line.get(name, False) for line in lines) for name in names
            }
            row["swapped"] = sum("swapped_own" in line for line in lines)
        else:
            targets = sum(sum(line["targets"]) for line in lines)
            row |= {"text_targets": targets}
            for name in ("memory_nats", "no_memory_nats"):
                if all(name in line for line in lines):
                    row[name] = sum(sum(line[name]) for line in lines) / targets
        rows.append(row)
    return rows


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*", metavar="RUN_OR_FOLDER")
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--segment-lengths", type=int, nargs="+", default=[64])
    parser.add_argument("--boundaries", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument(
        "--fillers", nargs="+", choices=["repeated", "text"], default=["repeated"]
    )
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="of products; the memory stays fp32",
    )
    parser.add_argument(
        "--text",
        nargs="*",
        default=[],
        metavar="PATTERN",
        help="held-out text, also the filler `text`",
    )
    parser.add_argument("--summary", action="store_true")
    return parser


if __name__ == "__main__":
    given = parser().parse_args()
    measure(given)
    if given.summary:
        for each in summary():
            print(json.dumps(each))
