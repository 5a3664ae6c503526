import torch


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, taken in fp64."""
    return (a.double() - b.double()).abs().max().item()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of b."""
    return largest(a, b) / b.abs().max().item()
