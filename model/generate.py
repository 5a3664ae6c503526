"""Sampling text token by token, with a key-value cache (softmax) or constant state (infini)."""

from collections.abc import Iterator

import torch

from model.llama import Llama


def filter_logits(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Logits [V] with all but the `top_k` largest, and all beyond a probability mass of `top_p`, at minus infinity.

    Nucleus sampling: Holtzman et al. 2020, arXiv 1904.09751. The most likely token always stays.
    """
    if top_k is not None:
        smallest = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(descending=True)
        mass_before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
        logits = logits.index_fill(0, order[mass_before >= top_p], float("-inf"))
    return logits


@torch.inference_mode()
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
    """New tokens one by one; the whole prompt is read, however long.

    Args:
        prompt: at least one token.
        temperature: 0 takes the most likely token each time.
        top_k, top_p: see `filter_logits`.
        seed: of a generator of this call's own; the global one is not touched.
        stop_id: ends the text and is not returned.

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    logits, states = model.prefill(torch.tensor([prompt], device=device))
    for number in range(max_new_tokens):
        scores = filter_logits(logits[0].float() / (temperature or 1.0), top_k, top_p)
        chosen = (
            scores.argmax() if temperature == 0 else torch.multinomial(scores.softmax(0), 1, generator=generator)[0]
        )
        if (token := int(chosen)) == stop_id:
            return
        yield token
        if number + 1 < max_new_tokens:
            logits, states = model.decode(chosen.view(1, 1), states)
