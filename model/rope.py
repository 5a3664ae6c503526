"""Rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.2) in Hugging Face's layout.

Element i of a head turns with element i + head_dim / 2. The scalings are those of Hugging Face's
`rope_parameters`, under the same keys.
"""

import math
from typing import Any, NamedTuple

import torch

from infini_llama.model.config import LlamaConfig, is_number


class Rotary(NamedTuple):
    """Cosines and sines [T, head_dim] of T positions, or [B, 1, T, head_dim] where rows differ.

    All layers share them.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., T, head_dim] turned by its positions' angles, rounded to the type of x once."""
        first, second = x.chunk(2, dim=-1)
        return (x * self.cos + torch.cat((-second, first), dim=-1) * self.sin).to(
            x.dtype
        )

    def at(self, positions: torch.Tensor) -> "Rotary":
        """The tables of positions [T], or [B, T] where rows differ, out of these of 0, 1, 2, …"""
        cos = self.cos[positions]
        sin = self.sin[positions]
        return (
            Rotary(cos, sin)
            if positions.ndim == 1
            else Rotary(cos[:, None], sin[:, None])
        )

    def first(self, length: int) -> "Rotary":
        """The first `length` positions."""
        return Rotary(self.cos[:length], self.sin[:length])

    def last(self, length: int) -> "Rotary":
        """The last `length` positions."""
        return Rotary(self.cos[-length:], self.sin[-length:])


def rotary(positions: torch.Tensor, config: LlamaConfig, dtype: torch.dtype) -> Rotary:
    """Tables of integer positions [T], in `dtype` or fp32 if that is wider."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies, scale = scaled_frequencies(config, positions.device, wide)
    angles = positions.to(wide)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return Rotary(angles.cos() * scale, angles.sin() * scale)


def segment_rotary(
    config: LlamaConfig,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Rotary:
    """Tables of the positions in a segment of `length` tokens.

    After them stand those of the tokens before it that it sees, which end with -1: of the segment
    before and of the sinks. A negative index is therefore that position.
    """
    positions = torch.arange(length, device=device)
    if config.sees_previous_segment:
        earlier = config.segment_length + config.attention_sinks
        positions = torch.cat((positions, torch.arange(-earlier, 0, device=device)))
    return rotary(positions, config, dtype)


def scaled_frequencies(
    config: LlamaConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, float]:
    """Angles per position [head_dim / 2], and the factor of cosines and sines.

    Raises:
        ValueError: rope_scaling has an unknown type, or a key is missing or out of its range.
    """
    size = config.head_size
    plain = 1.0 / config.rope_theta ** (
        torch.arange(0, size, 2, device=device).to(dtype) / size
    )
    scaling = config.rope_scaling or {"rope_type": "default"}
    match scaling.get("rope_type"):
        case "default":
            return plain, 1.0
        case "linear":
            return plain / _number(scaling, "factor", 1.0), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, scaling, config)
        case other:
            raise ValueError(
                f"rope_scaling.rope_type={other!r} is not one of default, linear, llama3, yarn"
            )


def _llama3(plain: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling (Grattafiori et al. 2024, arXiv 2407.21783).

    Long waves are slowed by the factor, short ones kept, with a ramp between.
    """
    factor = _number(scaling, "factor", 1.0)
    trained = _number(scaling, "original_max_position_embeddings", 1.0)
    low = _number(scaling, "low_freq_factor", 0.0)
    high = _number(scaling, "high_freq_factor", 0.0)
    if low >= high:
        raise ValueError(
            f"rope_scaling.low_freq_factor={low} must be less than high_freq_factor={high}"
        )
    # Full turns over the length it was trained at.
    turns = trained * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain


def _yarn(
    plain: torch.Tensor,
    scaling: dict[str, Any],
    config: LlamaConfig,
) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, sections 3.2 and 3.4).

    It is a ramp over the index of the frequency, and a temperature.
    """
    size = config.head_size
    theta = config.rope_theta
    factor = _number(scaling, "factor", 1.0)
    trained = _number(scaling, "original_max_position_embeddings", 1.0)
    fast = _number(scaling, "beta_fast", 0.0, 32.0)
    slow = _number(scaling, "beta_slow", 0.0, 1.0)
    if not fast >= slow > 0:
        raise ValueError(
            f"rope_scaling.beta_fast={fast} must be at least beta_slow={slow}, and both above 0"
        )
    if theta <= 1:
        raise ValueError(f"rope_theta={theta} must be more than 1 with rope_type=yarn")

    def index_of(turns: float) -> float:
        """Index of the frequency that makes `turns` turns over the trained length."""
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(index_of(fast)), 0)
    last = min(math.ceil(index_of(slow)), size - 1)
    steps = torch.arange(size // 2, device=plain.device).to(plain.dtype)
    slowed = ((steps - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    frequencies = plain / factor * slowed + plain * (1 - slowed)
    if scaling.get("attention_factor") is not None:
        return frequencies, _number(scaling, "attention_factor", 0.0)
    return frequencies, 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _number(
    scaling: dict[str, Any],
    key: str,
    lowest: float,
    default: float | None = None,
) -> float:
    value = scaling.get(key, default)
    if not is_number(value) or value < lowest:
        raise ValueError(
            f"rope_scaling.{key}={value!r} must be a number of at least {lowest:g}"
        )
    return float(value)
