"""A pretrained Llama with a memory: facts found after a long text of several books, and its language by position.

    python scripts/debian_texts.py books --held-out
    python benchmarks/facts_in_books.py workspace/runs/NAME … --text books/debian-handbook books/postgresql-doc-15 --lengths 4096 131072

A text is read once for all facts of a length (`evaluate --passkey --files`). For language, rows of ROW_SEGMENTS segments of --language are
read with an empty memory, after the first FULL tokens of the text (a full memory), and without the memory.

Full attention (a folder of Hugging Face, or a run) is asked the same questions. Where its context is too short for a text, it reads with
YaRN by the smallest whole factor, not trained for it. Of the text before a row it sees what the other model sees without its memory: the
last segment. Cases are in benchmarks/results/facts_in_books.jsonl; one that is there is not measured again.
"""

import argparse
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from pretrained_alternatives import least_factor, with_yarn
from pretrained_memory import opened, with_fields
from stored_rows import CaseLines, about
from tokenizers import Tokenizer

from infini_llama.model.llama import Llama, States
from infini_llama.tasks.evaluate.passkey import (
    BOUNDARIES_AFTER,
    HiddenFacts,
    ask_after,
    begin,
    passkey_after,
    remember,
    right_tokens,
)
from infini_llama.tasks.preprocess.sources.passkey import FORMS
from infini_llama.tasks.tokenizers.encoder import TextEncoder

RESULTS = Path(__file__).parent / "results" / "facts_in_books.jsonl"
ROW_SEGMENTS = 8
FULL = 131_072  # tokens


def tokens_of(places: list[Path], tokenizer: Tokenizer) -> list[int]:
    """Tokens of all .txt files, of each place in the order of their names."""
    files = [
        file
        for place in places
        for file in (sorted(place.rglob("*.txt")) if place.is_dir() else [place])
    ]
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    return tokenizer.encode(text, add_special_tokens=False).ids


def facts(
    model: Llama,
    tokenizer: Tokenizer,
    text: list[int],
    hidden: HiddenFacts,
    lengths: list[int],
) -> Iterator[tuple[dict, dict]]:
    """Length and result of each measurement."""
    encoder = TextEncoder(tokenizer, True)
    for cell in passkey_after(model, encoder, lengths, hidden, text):
        memory = cell["memory"].to_json()
        kept = ("tokens", "distance", "boundaries", "found", "right_tokens", "controls")
        result = {name: memory[name] for name in kept}
        without = {"found_without_memory": cell["no_memory"].found}
        yield {"length": memory["length"]}, result | without


def facts_with_full_attention(
    model: Llama,
    tokenizer: Tokenizer,
    text: list[int],
    hidden: HiddenFacts,
    lengths: list[int],
    segment_length: int,
) -> Iterator[tuple[dict, dict]]:
    """As `facts`, of the texts that a model with a memory has whose segments see the one before."""
    encoder = TextEncoder(tokenizer, True)
    ends = max(BOUNDARIES_AFTER, model.config.num_hidden_layers + 1)
    texts = ask_after(encoder, segment_length, ends, lengths, hidden, text)
    for length, of_length in texts.items():
        longest = max(of_length, key=lambda asked: asked.length)
        factor = least_factor(model, longest)
        reader = with_yarn(model, factor) if factor > 1 else model
        answers = [right_tokens(reader, begin(reader, asked)) for asked in of_length]
        result = {
            "rope_factor": factor,
            "tokens": longest.length,
            "distance": max(asked.after for asked in of_length),
            "found": sum(map(all, answers)) / len(answers),
        }
        yield {"length": length}, result


@torch.inference_mode()
def nats_by_segment(
    model: Llama, rows: torch.Tensor, states: States | None
) -> list[float]:
    """Nats per token of rows [n, ROW_SEGMENTS * N + 1], by segment; each is read from a copy of the states."""
    losses = torch.zeros(ROW_SEGMENTS)
    for row in rows.split(1):
        ids = row[:, :-1]
        before = (
            model.new_states(1, capacity=len(ids[0]))
            if states is None
            else deepcopy(states)
        )
        logits = model.logits(model.read(ids, before))
        nats = torch.nn.functional.cross_entropy(
            logits[0].float(), row[0, 1:], reduction="none"
        )
        losses += nats.view(ROW_SEGMENTS, -1).mean(dim=1)
    return (losses / len(rows)).tolist()


@torch.inference_mode()
def after_book(model: Llama, book: list[int], capacity: int, size: int) -> States:
    """States after whole segments of `size` tokens, of full attention after the last one."""
    if model.uses_memory():
        states = model.new_states(1, capacity=0)
        remember(model, iter(book), states)
        return states
    states = model.new_states(1, capacity=size + capacity)
    model.read(torch.tensor([book[-size:]]), states)
    return states


def language(
    model: Llama, tokenizer: Tokenizer, options: argparse.Namespace
) -> Iterator[tuple[dict, dict]]:
    """Memory and result of each measurement."""
    size = ROW_SEGMENTS * options.segment_length
    ids = tokens_of(options.language, tokenizer)
    starts = torch.linspace(0, len(ids) - size - 1, options.rows).long().tolist()
    rows = torch.stack([torch.tensor(ids[at : at + size + 1]) for at in starts])
    yield {"memory": "empty"}, {"nats": nats_by_segment(model, rows, None)}
    book = tokens_of(options.text, tokenizer)[:FULL]
    whole = len(book) - len(book) % options.segment_length
    states = after_book(model, book[:whole], size, options.segment_length)
    yield {"memory": "full"}, {"nats": nats_by_segment(model, rows, states)}
    if not model.uses_memory():
        return
    model.use_memory(False)
    yield {"memory": "none"}, {"nats": nats_by_segment(model, rows, None)}
    model.use_memory(True)


def measure(options: argparse.Namespace) -> None:
    lines = CaseLines(RESULTS)

    def add(case: dict, results: Iterator[tuple[dict, dict]]) -> None:
        started = time.perf_counter()
        for cell, result in results:
            seconds = round(time.perf_counter() - started, 1)
            lines.add(case | cell, result | {"seconds": seconds} | about())

    for place in options.models:
        model, tokenizer, named = opened(place, options.checkpoint)
        is_full = model.config.attention == "softmax"
        if not is_full:
            fields = {"segment_length": options.segment_length}
            if options.attend_previous is not None:
                fields["attend_previous_segment"] = options.attend_previous
            model = with_fields(model, **fields)
            sees = model.config.attend_previous_segment
            named |= fields | {"attend_previous_segment": sees}
        with torch.autocast("cpu", torch.bfloat16):
            for form in options.forms if is_full or model.uses_memory() else ():
                case = named | {"kind": "facts", "form": form}
                case |= {"samples": options.samples, "seed": options.seed}
                missing = [
                    length
                    for length in options.lengths
                    if case | {"length": length} not in lines
                ]
                if missing:
                    text = tokens_of(options.text, tokenizer)
                    hidden = HiddenFacts(form, options.samples, options.seed)
                    given = (model, tokenizer, text, hidden, missing)
                    if is_full:
                        size = options.segment_length
                        add(case, facts_with_full_attention(*given, size))
                    else:
                        add(case, facts(*given))
            case = named | {"kind": "language", "rows": options.rows}
            case |= {"text": [place.name for place in options.language]}
            case |= {"row_tokens": ROW_SEGMENTS * options.segment_length}
            if options.language and case | {"memory": "empty"} not in lines:
                add(case, language(model, tokenizer, options))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*", metavar="RUN_OR_FOLDER")
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="PLACE")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4096, 32768, 131_072]
    )
    parser.add_argument(
        "--forms", nargs="*", choices=FORMS, default=["sentences", "niah_single"]
    )
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--segment-length", type=int, default=256)
    parser.add_argument("--attend-previous", action=argparse.BooleanOptionalAction)
    parser.add_argument("--language", type=Path, nargs="*", default=[], metavar="PLACE")
    parser.add_argument("--rows", type=int, default=16)
    return parser


if __name__ == "__main__":
    measure(parser().parse_args())
