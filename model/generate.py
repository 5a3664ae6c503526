"""Text generation token by token.

Each prompt is read in the parallel form; then one token at a time of all, from each layer's state.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from infini_llama.model.llama import Llama, States


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the defaults always take the likeliest.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: only so many of the likeliest tokens are drawn from.
        top_p: only the fewest of the likeliest that reach this mass (nucleus sampling: Holtzman et
            al. 2020, arXiv 1904.09751).
        min_p: only those at least so likely as this share of the likeliest (Nguyen et al. 2024,
            arXiv 2407.01082).
        repetition_penalty: logits of tokens that the text already has are divided by it, or
            multiplied where they are negative (Keskar et al. 2019, arXiv 1909.05858, section 4.1).
        seed: of generators of this call's own, on the CPU, so that it means the same choices on
            every device.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0


def choose(
    logits: torch.Tensor,
    seen: torch.Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> int:
    """One token by logits [V]; `seen` [V] is True for tokens that the text has."""
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        wide = logits.double()
        penalised = torch.where(wide > 0, wide / penalty, wide * penalty).to(
            logits.dtype
        )
        # Of two infinite logits, the difference is not a number.
        limits = torch.finfo(logits.dtype)
        logits = torch.where(seen, penalised.clamp(limits.min, limits.max), logits)
    if sampling.temperature == 0:
        return int(logits.argmax())
    # In fp64, and with 0 for the likeliest: a small temperature overflows to minus infinity alone.
    scaled = ((logits - logits.max()).double() / sampling.temperature).to(logits.dtype)
    likely = keep_likely(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    return int(torch.multinomial(likely.softmax(dim=0), 1, generator=generator))


def keep_likely(
    logits: torch.Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> torch.Tensor:
    """Logits [V] with minus infinity for all that top_k, then top_p, then min_p leave out.

    The likeliest always stays.
    """
    ordered, order = logits.sort(descending=True, stable=True)
    if top_k is not None:
        ordered[top_k:] = -torch.inf
    if top_p is not None and top_p < 1:  # rounded sums reach 1 before the last token
        probabilities = ordered.softmax(dim=0)
        mass_before = probabilities.cumsum(dim=0) - probabilities
        ordered[1:][mass_before[1:] >= top_p] = -torch.inf  # a tiny top_p is 0 in fp32
    if min_p is not None:
        probabilities = ordered.softmax(dim=0)
        ordered[probabilities < min_p * probabilities[0]] = -torch.inf
    return torch.empty_like(logits).scatter_(0, order, ordered)


@torch.inference_mode()
def generate_batch(
    model: Llama,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    ends: Callable[[int, int], bool] = lambda _row, _token: False,
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """The next token of every row, step by step, for prompts of any lengths.

    It is None for a row that has ended.

    A row's tokens do not depend on the other rows: each draws from a generator of its own, seeded
    alike, but for a prompt that is there several times, whose copies are seeded with one more each.

    Args:
        ends: called with the row and its new token, each token once; True makes it the row's last.
        vocab_size: of the tokenizer: IDs from here on, which only pad the embedding, are not
            chosen. None: the model's.

    Raises:
        ValueError: there is no prompt, or one is empty.
    """
    if not prompts or not all(prompts):
        raise ValueError("the prompt has no tokens; give at least one")
    if max_new_tokens < 1:
        return
    device = model.lm_head.weight.device
    size = vocab_size or model.config.vocab_size
    seen = torch.zeros(len(prompts), size, dtype=torch.bool)
    generators: list[torch.Generator] = []
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
        copies = prompts[:row].count(prompt)
        generators.append(torch.Generator().manual_seed(sampling.seed + copies))
    logits, states = _read_prompts(model, prompts, max_new_tokens)
    open_rows = set(range(len(prompts)))
    for remaining in range(max_new_tokens - 1, -1, -1):
        step: list[int | None] = [None] * len(prompts)
        for row, scores in enumerate(logits[:, :size].float().cpu()):
            if row not in open_rows:
                continue
            token = choose(scores, seen[row], sampling, generators[row])
            step[row] = token
            seen[row, token] = True
            if ends(row, token):
                open_rows.remove(row)
        yield step
        if not remaining or not open_rows:
            return
        tokens = torch.tensor([token or 0 for token in step], device=device)
        logits = model.decode(tokens, states)


def _read_prompts(
    model: Llama,
    prompts: list[list[int]],
    max_new_tokens: int,
) -> tuple[torch.Tensor, States]:
    """Logits [B, V] after each prompt, and the states of all rows with room for the new tokens."""
    device = model.lm_head.weight.device
    capacity = max(map(len, prompts)) + max_new_tokens
    states = model.new_states(len(prompts), capacity)
    logits: list[torch.Tensor] = []
    for row, prompt in enumerate(prompts):
        scores, read = model.prefill(torch.tensor([prompt], device=device), len(prompt))
        for state, of_row in zip(states.layers, read.layers, strict=True):
            state.set_row(row, of_row)
        logits.append(scores)
    return torch.cat(logits), states
