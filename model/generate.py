"""Text token by token: the prompt in one parallel pass, then one token at a time from each layer's state."""

from collections.abc import Iterator

import torch

from model.llama import Llama


def generate(
    model: Llama,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
) -> Iterator[int]:
    """New tokens one by one, after the whole prompt, however long.

    Args:
        prompt: at least one token.
        temperature: divides the logits; 0 takes the most likely token each time.
        top_k, top_p: see `keep_likely`.
        seed: of a generator of this call's own; torch's global one is not touched.
        stop_id: ends the text and is not returned.

    Raises:
        ValueError: the prompt is empty, or an argument is out of its range.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; 0 is greedy")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} keeps no token; give 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is outside (0, 1]")
    # A generator of the CPU, so that a seed means the same choices on every device.
    generator = torch.Generator().manual_seed(seed)
    return _tokens(model, prompt, max_new_tokens, temperature, top_k, top_p, generator, stop_id)


@torch.inference_mode()
def _tokens(
    model: Llama,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
    stop_id: int | None,
) -> Iterator[int]:
    if max_new_tokens < 1:
        return
    device = model.lm_head.weight.device
    logits, states = model.prefill(torch.tensor([prompt], device=device), capacity=len(prompt) + max_new_tokens)
    for remaining in range(max_new_tokens - 1, -1, -1):
        token = choose(logits[0].float().cpu(), temperature, top_k, top_p, generator)
        if token == stop_id:
            return
        yield token
        if remaining:
            logits = model.decode(torch.tensor([token], device=device), states)


def choose(
    logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    """One token by logits [V]: the most likely at temperature 0, else drawn from those that `keep_likely` leaves."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = keep_likely(logits / temperature, top_k, top_p).softmax(dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def keep_likely(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Logits [V] with minus infinity for all but the `top_k` likeliest, then all but the fewest that reach the mass `top_p`.

    Nucleus sampling: Holtzman et al. 2020, arXiv 1904.09751, section 3.1. The likeliest token always stays.
    """
    ordered, order = logits.sort(descending=True, stable=True)
    if top_k is not None:
        ordered[top_k:] = -torch.inf
    if top_p is not None:
        probabilities = ordered.softmax(dim=0)
        mass_before = probabilities.cumsum(dim=0) - probabilities
        ordered[mass_before >= top_p] = -torch.inf
    return torch.empty_like(logits).scatter_(0, order, ordered)
