"""A number in a text of up to a million tokens: is it found, and is it the memory that holds it?

    .venv/bin/python benchmarks/memory_passkey.py [--updates linear delta …] [--seeds 0 1 2] [--fillers random repeated] [--places start …]

The task is `passkey` of benchmarks/memory.py: five ordered digits behind a mark, segments of 16 tokens, trained on 2 to 8 segments. The
weights of a trained model are kept in build/memory, and a second start only measures. A text is read as a stream in constant memory.

start: the number is in the first segment and asked for after each of DISTANCES segment boundaries, of the same text. middle, end: of a text
with LONGEST boundaries, the number is in the middle or in the last segment before the question; five numbers share the text before them.
Filler is drawn at random, or 19 tokens are repeated, others in each text.

Controls, at CONTROL boundaries: M and z of two texts are swapped (own: share of own numbers found, other: of the other text's); M and z of
a text with no number; no memory.

Results are added to benchmarks/results/memory_passkey.json after each text kind; `benchmarks/memory.py --tables` writes their tables.
"""

import argparse
import time
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from memory import TASKS, train
from memory_results import store
from memory_rows import DIGITS, FILLERS, SEGMENT

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, States
from infini_llama.model.segment_states import InfiniState

WEIGHTS = Path(__file__).parents[1] / "build" / "memory"
DISTANCES = (1, 8, 64, 256, 1024, 4096, 16_384, 62_499)
LONGEST, CONTROL, SIZE = DISTANCES[-1], 1024, 5
# Texts up to the second last distance, at the last, and read at a time.
NUMBERS, NUMBERS_LONGEST, TOGETHER = (
    50,
    20,
    10,
)
PIECE = 100  # segments read at a time
PERIOD = 19  # of repeated filler; coprime with SEGMENT, so that it stands differently in each segment
Measured = dict[str, Any]


def trained(update: str, jitter: float, seed: int) -> tuple[Llama, Measured]:
    """A model from its kept weights, or trained now, and how it was trained."""
    path = WEIGHTS / f"passkey-{update}-{jitter:g}-{seed}.pt"
    task = replace(
        TASKS["passkey"], recipe=replace(TASKS["passkey"].recipe, jitter=jitter)
    )
    if not path.exists():
        started = time.process_time()
        model, curve = train(
            task,
            {
                "attention": "infini",
                "memory_update": update,
                "memory_write_jitter": jitter,
            },
            seed,
        )
        about = {"cpu_seconds": round(time.process_time() - started, 1), "curve": curve}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"state": model.state_dict(), "config": model.config.to_dict(), **about},
            path,
        )
    kept = torch.load(path, weights_only=True)
    model = Llama(LlamaConfig(**kept["config"]))
    model.load_state_dict(kept["state"])
    about = {name: kept[name] for name in ("cpu_seconds", "curve")}
    return model.eval(), about | {
        "recipe": asdict(task.recipe),
        "model": kept["config"],
    }


class Texts:
    """Filler of `count` texts that never ends, and segments with a number or the question for it."""

    def __init__(self, count: int, filler: str, seed: int) -> None:
        self.generator, self.filler, self.read = (
            torch.Generator().manual_seed(seed),
            filler,
            0,
        )
        self.period = torch.randint(FILLERS, (count, PERIOD), generator=self.generator)
        self.digits = torch.randint(DIGITS, (count, SIZE), generator=self.generator)

    def segments(self, count: int) -> torch.Tensor:
        """The next `count` segments of filler, [texts, count * SEGMENT]."""
        length = count * SEGMENT
        if self.filler == "random":
            return torch.randint(
                FILLERS, (len(self.digits), length), generator=self.generator
            )
        self.read += length
        return self.period[:, torch.arange(self.read - length, self.read) % PERIOD]

    def with_digits(self, mark: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A segment with a mark and the digits behind it, and the places of the mark [texts, 1]."""
        inputs = self.segments(1).clone()
        places = torch.randint(
            SEGMENT - SIZE, (len(inputs), 1), generator=self.generator
        )
        inputs.scatter_(1, places, FILLERS + DIGITS + mark)
        inputs.scatter_(1, places + 1 + torch.arange(SIZE), FILLERS + self.digits)
        return inputs, places


def read_filler(model: Llama, texts: Texts, states: States, count: int) -> None:
    for first in range(0, count, PIECE):
        model.read(texts.segments(min(PIECE, count - first)), states)


def ask(
    model: Llama, states: States, question: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """The digits [texts, SIZE] that greedy decoding writes behind the question's mark; the states stay as they are."""
    question = question.clone()
    for place in range(SIZE):
        hidden = model.read(question, deepcopy(states))
        chosen = model.logits(
            hidden.take_along_dim((places + place)[..., None], dim=1)
        ).argmax(dim=-1)
        question.scatter_(1, places + place + 1, chosen)
    return question.take_along_dim(places + 1 + torch.arange(SIZE), dim=1) - FILLERS


def swapped(states: States) -> States:
    """The same with M and z of another text, the next one."""
    other = deepcopy(states)
    for state in other.layers:
        assert isinstance(state, InfiniState)
        state.memory.M.copy_(state.memory.M.roll(-1, dims=0))
        state.memory.z.copy_(state.memory.z.roll(-1, dims=0))
    return other


def ask_without_memory(
    model: Llama, question: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """As `ask`; local attention reads the question's segment alone."""
    model.use_memory(False)
    try:
        return ask(model, model.new_states(len(question), SEGMENT), question, places)
    finally:
        model.use_memory(True)


@torch.inference_mode()
def from_start(
    model: Llama, filler: str, seed: int, until: int
) -> tuple[list[Measured], dict[str, float]]:
    """What is found after each distance up to `until`, and the controls."""
    right: dict[int, list[torch.Tensor]] = {
        distance: [] for distance in DISTANCES if distance <= until
    }
    controls: dict[str, list[torch.Tensor]] = {}

    def note(name: str, found: torch.Tensor, digits: torch.Tensor) -> None:
        controls.setdefault(name, []).append((found == digits).all(dim=1))

    for first in range(0, NUMBERS, TOGETHER):
        texts, states = (
            Texts(TOGETHER, filler, 1000 * seed + first),
            model.new_states(TOGETHER, SEGMENT),
        )
        bare, bare_states = deepcopy(texts), model.new_states(TOGETHER, SEGMENT)
        bare.generator = torch.Generator().manual_seed(1000 * seed + first + 500)
        model.read(texts.with_digits(0)[0], states)
        model.read(bare.segments(1), bare_states)
        done = 0
        for distance in right:
            if distance == LONGEST and first >= NUMBERS_LONGEST:
                break
            read_filler(model, texts, states, distance - 1 - done)
            if distance <= CONTROL:
                read_filler(model, bare, bare_states, distance - 1 - done)
            done = distance - 1
            question, places = deepcopy(texts).with_digits(1)
            right[distance].append(ask(model, states, question, places) == texts.digits)
            if distance == CONTROL:
                found = ask(model, swapped(states), question, places)
                note("swapped, own", found, texts.digits)
                note("swapped, other", found, texts.digits.roll(-1, dims=0))
                note(
                    "filler alone",
                    ask(model, bare_states, question, places),
                    texts.digits,
                )
                note(
                    "memory off",
                    ask_without_memory(model, question, places),
                    texts.digits,
                )
    found = [shares(distance, torch.cat(parts)) for distance, parts in right.items()]
    return found, {
        name: torch.cat(parts).float().mean().item() for name, parts in controls.items()
    }


@torch.inference_mode()
def inside(model: Llama, filler: str, seed: int, place: str) -> list[Measured]:
    """The number in the middle of a text of LONGEST boundaries, or in the last segment before the question."""
    before, each = {"middle": LONGEST // 2, "end": LONGEST - 1}[place], 5
    right: list[torch.Tensor] = []
    for first in range(0, NUMBERS_LONGEST, each):
        shared, states = (
            Texts(1, filler, 1000 * seed + 900 + first),
            model.new_states(1, SEGMENT),
        )
        read_filler(model, shared, states, before)
        texts, many = (
            Texts(each, filler, 1000 * seed + 950 + first),
            model.new_states(each, SEGMENT),
        )
        texts.period, texts.read = shared.period.expand(each, -1), shared.read
        for one, other in zip(states.layers, many.layers, strict=True):
            assert isinstance(one, InfiniState) and isinstance(other, InfiniState)
            other.memory.M.copy_(one.memory.M.expand_as(other.memory.M))
            other.memory.z.copy_(one.memory.z.expand_as(other.memory.z))
            other.segments = [before] * each
            other.written = [before] * each
        model.read(texts.with_digits(0)[0], many)
        read_filler(model, texts, many, LONGEST - 1 - before)
        right.append(ask(model, many, *texts.with_digits(1)) == texts.digits)
    return [shares(LONGEST - before, torch.cat(right))]


def shares(boundaries: int, right: torch.Tensor) -> Measured:
    """boundaries: between number and question; whole: share of the numbers found; tokens: of each digit."""
    tokens = [round(share, 4) for share in right.float().mean(0).tolist()]
    return {
        "boundaries": boundaries,
        "numbers": len(right),
        "whole": right.all(dim=1).float().mean().item(),
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--updates", nargs="+", default=["linear", "delta", "delta_bounded"]
    )
    parser.add_argument("--jitter", type=float, default=TASKS["passkey"].recipe.jitter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--fillers",
        nargs="+",
        choices=["random", "repeated"],
        default=["random", "repeated"],
    )
    parser.add_argument(
        "--places",
        nargs="+",
        choices=["start", "middle", "end"],
        default=["start", "middle", "end"],
    )
    parser.add_argument(
        "--until",
        type=int,
        default=LONGEST,
        help="most boundaries with the number at the start",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for update in options.updates:
        for seed in options.seeds:
            model, about = trained(update, options.jitter, seed)
            kinds = [
                (place, filler)
                for place in options.places
                for filler in options.fillers
            ]
            for place, filler in kinds:
                started = time.process_time()
                about |= {
                    "update": update,
                    "jitter": options.jitter,
                    "seed": seed,
                    "filler": filler,
                    "place": place,
                }
                about.pop("controls", None)
                if place == "start":
                    about["found"], about["controls"] = from_start(
                        model, filler, seed, options.until
                    )
                else:
                    about["found"] = inside(model, filler, seed, place)
                about["measuring_cpu_seconds"] = round(time.process_time() - started, 1)
                store(
                    "memory_passkey",
                    about,
                    ("update", "jitter", "seed", "filler", "place"),
                )
                words = ", ".join(
                    f"{one['boundaries']}: {one['whole']:.2f}" for one in about["found"]
                )
                took = about["measuring_cpu_seconds"]
                print(
                    f"{update} {options.jitter:g} seed {seed}, {filler}, {place}: {words}; {took} s",
                    flush=True,
                )
                print(about.get("controls", ""), flush=True)


if __name__ == "__main__":
    main()
