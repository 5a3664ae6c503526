"""Linear layers that read the same input, one after another or as one matrix product."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import torch
import torch.nn.functional as F
from torch import nn


def project(x: torch.Tensor, layers: tuple[nn.Linear, ...], fused: bool) -> tuple[torch.Tensor, ...]:
    """layer(x) of each layer.

    Fused, their weights are stacked to one matrix for a single product, and so is the gradient of x. The results are views of its
    output, and differ from those of separate products by rounding alone. The parameters stay separate: checkpoints, optimizer,
    sharding and export do not change.

    Args:
        x: [..., in_features] of all layers, which have no bias.

    Returns:
        [..., out_features] of each.
    """
    if not fused:
        return tuple(layer(x) for layer in layers)
    weights = [layer.weight for layer in layers]
    if torch.is_autocast_enabled(x.device.type):
        # Cast before they are stacked, as autocast would cast each: compiled code does both in one pass over the weights.
        weights = [weight.to(torch.get_autocast_dtype(x.device.type)) for weight in weights]
    return F.linear(x, torch.cat(weights)).split([layer.out_features for layer in layers], dim=-1)
