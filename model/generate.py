"""Text token by token: the prompts in one parallel pass, then one token at a time from each layer's state."""

from collections.abc import Callable, Iterator

import torch

from infini_llama.model.llama import Llama
from infini_llama.model.sampling import Sampling, choose


def generate(
    model: Llama, prompt: list[int], max_new_tokens: int, sampling: Sampling | None = None, stop_id: int | None = None
) -> Iterator[int]:
    """New tokens one by one, after the whole prompt, however long; `stop_id` ends the text and is not returned.

    Raises:
        ValueError: the prompt is empty.
    """
    steps = generate_batch(model, [prompt], max_new_tokens, sampling, lambda _row, token: token == stop_id)
    return (token for step in steps for token in step if token is not None and token != stop_id)


def generate_batch(
    model: Llama,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    ends: Callable[[int, int], bool] = lambda _row, _token: False,
) -> Iterator[list[int | None]]:
    """The next token of every row, step by step, for prompts of any lengths; None for a row that has ended.

    A row's tokens do not depend on the other rows: each draws from a generator of its own, seeded alike, but for a prompt that is
    there several times, whose copies are seeded with one more each.

    Args:
        ends: called with the row and its new token, each token once; True makes it the row's last.

    Raises:
        ValueError: there is no prompt, or one is empty.
    """
    if not prompts or not all(prompts):
        raise ValueError("the prompt has no tokens; give at least one")
    return _steps(model, prompts, max_new_tokens, sampling or Sampling(), ends)


@torch.inference_mode()
def _steps(
    model: Llama,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    ends: Callable[[int, int], bool],
) -> Iterator[list[int | None]]:
    if max_new_tokens < 1:
        return
    device, vocabulary = model.lm_head.weight.device, model.config.vocab_size
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
    generators: list[torch.Generator] = []
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
        generators.append(torch.Generator().manual_seed(sampling.seed + prompts[:row].count(prompt)))
    ragged = lengths if min(lengths) < longest else None
    logits, states = model.prefill(ids, longest + max_new_tokens, ragged)
    open_rows = set(range(len(prompts)))
    for remaining in range(max_new_tokens - 1, -1, -1):
        step: list[int | None] = [None] * len(prompts)
        for row, scores in enumerate(logits.float().cpu()):
            if row in open_rows:
                step[row] = token = choose(scores, seen[row], sampling, generators[row])
                seen[row, token] = True
                if ends(row, token):
                    open_rows.remove(row)
        yield step
        if not remaining or not open_rows:
            return
        logits = model.decode(torch.tensor([token or 0 for token in step], device=device), states)
