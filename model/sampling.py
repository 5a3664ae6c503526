"""Which token comes next, by the logits of one row."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the defaults always take the likeliest.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: only so many of the likeliest tokens are drawn from.
        top_p: only the fewest of the likeliest that reach this mass (nucleus sampling: Holtzman et al. 2020, arXiv 1904.09751).
        min_p: only those at least so likely as this share of the likeliest (Nguyen et al. 2024, arXiv 2407.01082).
        repetition_penalty: logits of tokens that the text already has are divided by it, or multiplied where they are negative
            (Keskar et al. 2019, arXiv 1909.05858, section 4.1).
        seed: of generators of this call's own, on the CPU, so that it means the same choices on every device.

    Raises:
        ValueError: one of them is out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} is not a finite number of at least 0; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} keeps no token; give 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is outside [0, 1]")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} is not a finite number above 0; 1 is none")


def choose(logits: torch.Tensor, seen: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token by logits [V]; `seen` [V] is True for tokens that the text has."""
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        wide = logits.double()
        penalised = torch.where(wide > 0, wide / penalty, wide * penalty).to(logits.dtype)
        limits = torch.finfo(logits.dtype)  # of two infinite logits, the difference is not a number
        logits = torch.where(seen, penalised.clamp(limits.min, limits.max), logits)
    if sampling.temperature == 0:
        return int(logits.argmax())
    # In fp64, and with 0 for the likeliest: a small temperature overflows to minus infinity alone.
    scaled = ((logits - logits.max()).double() / sampling.temperature).to(logits.dtype)
    likely = keep_likely(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    return int(torch.multinomial(likely.softmax(dim=0), 1, generator=generator))


def keep_likely(
    logits: torch.Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> torch.Tensor:
    """Logits [V] with minus infinity for all that top_k, then top_p, then min_p leave out; the likeliest always stays."""
    ordered, order = logits.sort(descending=True, stable=True)
    if top_k is not None:
        ordered[top_k:] = -torch.inf
    if top_p is not None and top_p < 1:  # rounded sums reach 1 before the last token
        probabilities = ordered.softmax(dim=0)
        mass_before = probabilities.cumsum(dim=0) - probabilities
        ordered[mass_before >= top_p] = -torch.inf
    if min_p is not None:
        probabilities = ordered.softmax(dim=0)
        ordered[probabilities < min_p * probabilities[0]] = -torch.inf
    return torch.empty_like(logits).scatter_(0, order, ordered)
