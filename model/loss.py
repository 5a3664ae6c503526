"""Cross-entropy of the next token, with or without all of a batch's logits at once."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import math
import re
from typing import Any

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def cross_entropy_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    z_loss: float = 0.0,
    row_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over targets of -log p(label), in fp32 at least, and their number.

    A sum, not a mean: the mean over a whole step's tokens is taken once, so that it does not depend
    on how the step is split.

    Args:
        logits: [B, T, V].
        labels: [B, T] int64; IGNORE_INDEX is no target.
        z_loss: weight of log^2 Z (Chowdhery et al. 2022, arXiv 2204.02311, section 5), which keeps
            logits from drifting. Its gradient is added; the value stays the cross-entropy, so that
            losses can be compared.
        row_weights: [B], by which the gradient of each row's losses is multiplied; the value has no
            weights. None: 1.

    Returns:
        the sum (scalar, nats) and the number of targets (scalar int64).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_target = labels != IGNORE_INDEX
    losses = F.cross_entropy(
        wide.flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum" if row_weights is None else "none",
    )
    total = losses
    weights = is_target
    if row_weights is not None:
        weights = is_target * row_weights[:, None].to(wide.dtype)
        weighted = (losses * weights.flatten()).sum()
        total = losses.detach().sum() + (weighted - weighted.detach())
    if z_loss:
        penalty = z_loss * (wide.logsumexp(dim=-1).square() * weights).sum()
        total = total + (penalty - penalty.detach())
    return total, is_target.sum()


def chunked_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
    row_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy_sum` of the logits hidden @ weight^T, `chunk` tokens at a time.

    Only the logits of one chunk exist at a time.

    The gradient is taken chunk by chunk in the forward pass (as Hsu et al. 2024, "Liger Kernel",
    arXiv 2410.10989, section 3.2), and only scaled in the backward pass, so that no logits are
    computed twice. Not all tokens have logits: see `tokens_with_logits`.

    Args:
        hidden: [B, T, D]; weight: [V, D]; labels: [B, T] int64.
        vocabulary: tokens; further rows of `weight` pad it and have no probability. None: all V
            rows are tokens.
        row_weights: as in `cross_entropy_sum`.
    """
    device = hidden.device.type
    dtype = (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device)
        else hidden.dtype
    )
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    token_weights = None
    if row_weights is not None:
        wide = torch.promote_types(dtype, torch.float32)
        token_weights = row_weights[:, None].to(wide).expand_as(labels).flatten()
    total, _, _ = loss_and_gradients(
        hidden.flatten(0, 1).to(dtype),
        weight,
        labels.flatten(),
        chunk,
        z_loss,
        vocabulary,
        token_weights,
        learns,
        learns and weight.requires_grad,
    )
    return total, (labels != IGNORE_INDEX).sum()


def in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    z_loss: float,
    vocabulary: int | None,
    token_weights: torch.Tensor | None,
    learns: bool,
    weight_learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of losses and its gradients.

    Those are of hidden [N, D] in its type, if `learns`, and of weight [V, D] in fp32 at least, if
    `weight_learns`. Gradients of each token's loss are multiplied by `token_weights` [N], if any.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    narrow = weight.to(hidden.dtype)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    grad_hidden, grad_weight = _gradients_like(hidden, weight, learns, weight_learns)
    chosen = tokens_with_logits(labels, chunk)
    x = hidden
    grad_x = grad_hidden
    if chosen is not None:
        x = hidden[chosen]
        labels = labels[chosen]
        token_weights = None if token_weights is None else token_weights[chosen]
        grad_x = grad_hidden.new_empty(len(chosen), hidden.shape[1])
    with torch.autocast(hidden.device.type, enabled=False):
        for part in range(0, x.shape[0], chunk):
            rows = slice(part, part + chunk)
            gradients = None
            if learns:
                of_tokens = None if token_weights is None else token_weights[rows, None]
                gradients = (
                    grad_x[rows],
                    grad_weight if weight_learns else None,
                    of_tokens,
                )
            total += _chunk(
                x[rows], narrow, labels[rows, None], z_loss, vocabulary, gradients
            )
    if chosen is not None and learns:
        grad_hidden.zero_()[chosen] = grad_x
    return total, grad_hidden, grad_weight


def tokens_with_logits(labels: torch.Tensor, chunk: int) -> torch.Tensor | None:
    """Indices of the tokens of a micro-batch whose logits a loss in chunks computes.

    On a CPU these are the tokens that have a target, if fewer chunks hold them than hold all
    tokens. A GPU would have to be asked how many there are.

    Args:
        labels: [N] int64; IGNORE_INDEX is no target.
        chunk: tokens of a chunk; 0: all logits are computed at once.

    Returns:
        the indices; None: all tokens.
    """
    if not chunk or labels.device.type != "cpu":
        return None
    targets = (labels != IGNORE_INDEX).nonzero()[:, 0]
    chunks_of_targets = math.ceil(len(targets) / chunk)
    chunks_of_all = math.ceil(len(labels) / chunk)
    return targets if chunks_of_targets < chunks_of_all else None


def _chunk(
    x: torch.Tensor,
    weight: torch.Tensor,
    label: torch.Tensor,
    z_loss: float,
    vocabulary: int | None,
    gradients: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None,
) -> torch.Tensor:
    """The sum of losses of x [n, D]; writes the gradient of x, and adds that of the weight.

    Its logits are freed with it.

    Args:
        gradients: those of x and the weight, and the weights [n, 1] of the tokens in them.
    """
    is_target = label != IGNORE_INDEX
    label = torch.where(is_target, label, 0)
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    if vocabulary is not None:
        logits[
            :, vocabulary:
        ] = -torch.inf  # at its full width, to which the products are aligned
    of_label = logits.gather(1, label)
    largest = logits.amax(1, keepdim=True)
    probabilities = torch.softmax(logits, 1, out=logits)
    # The largest probability is 1 / sum of exp(logit - largest).
    log_z = largest - probabilities.amax(1, keepdim=True).log()
    if gradients is not None:
        of_x, of_weight, of_tokens = gradients
        if z_loss:
            probabilities *= 1 + 2 * z_loss * log_z
        probabilities.scatter_add_(1, label, torch.full_like(log_z, -1.0))
        if of_tokens is not None:
            probabilities *= of_tokens
        gradient = probabilities.to(x.dtype)
        of_x.copy_((gradient @ weight) * is_target)
        if of_weight is not None:
            x = x * is_target
            if of_weight.dtype == gradient.dtype:
                of_weight.addmm_(gradient.T, x)
            else:  # sums over chunks stay in fp32
                of_weight += gradient.T @ x
    return ((log_z - of_label) * is_target).sum()


# An operator of its own, so that compiled code calls it as it is; named after this module, since a
# copy of it in an exported model that defined the same name would free this one in torch.
OPERATORS = re.sub(r"\W", "_", __name__)
loss_and_gradients = torch.library.custom_op(
    OPERATORS + "::chunked_cross_entropy",
    in_chunks,
    mutates_args=(),
)


def _gradients_like(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    learns: bool,
    weight_learns: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors that the gradients are written to; empty where nothing learns."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    of_hidden = torch.empty_like(hidden) if learns else hidden.new_empty(0)
    if weight_learns:
        return of_hidden, torch.zeros_like(weight, dtype=wide)
    return of_hidden, weight.new_empty(0, dtype=wide)


@loss_and_gradients.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:
    *_, learns, weight_learns = others
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_empty((), dtype=wide)
    return total, *_gradients_like(hidden, weight, learns, weight_learns)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype = inputs[1].dtype


def _backward(
    ctx: Any, scale: torch.Tensor, *_: None
) -> tuple[torch.Tensor | None, ...]:
    grad_hidden, grad_weight = ctx.saved_tensors
    of_hidden = (grad_hidden * scale).to(grad_hidden.dtype)
    of_weight = (
        (grad_weight * scale).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
    )
    return of_hidden, of_weight, None, None, None, None, None, None, None


loss_and_gradients.register_autograd(_backward, setup_context=_setup)
