"""Damage as a disk does it."""

from pathlib import Path


def flip(path: Path, bit: int | None = None) -> None:
    """Flip one bit of a file, by default the lowest of its middle byte."""
    content = bytearray(path.read_bytes())
    bit = len(content) // 2 * 8 if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
