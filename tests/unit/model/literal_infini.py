"""Infini-attention written down as the paper prints it (arXiv 2404.07143, section 3.1): a loop over rows, heads and segments."""

import math

import torch


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [N, d] with pair (i, i + d/2) of position t rotated by t / theta^(2i/d), one complex number a pair."""
    length, size = x.shape
    angles = torch.outer(
        torch.arange(length, dtype=x.dtype), theta ** -(torch.arange(0, size, 2, dtype=x.dtype) / size)
    )
    pairs = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def one_head(Q, K, V, beta, segment_length, theta):
    """Q, K, V [T, d] of one row and head, not rotated; the output [T, d]."""
    size = Q.shape[1]
    M, z, outputs = None, None, []
    for start in range(0, len(Q), segment_length):
        q, k, v = (x[start : start + segment_length] for x in (Q, K, V))
        scores = turned(q, theta) @ turned(k, theta).T / math.sqrt(size)  # eq. 6
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -math.inf)
        A = scores.softmax(dim=1) @ v
        feature_q, feature_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
        if M is not None and z is not None:
            A_mem = (feature_q @ M) / (feature_q @ z)[:, None]  # eq. 7
            A = beta.sigmoid() * A_mem + (1 - beta.sigmoid()) * A  # eq. 10
        outputs.append(A)
        added_M, added_z = feature_k.T @ v, feature_k.sum(dim=0)  # eq. 8
        M, z = (added_M, added_z) if M is None or z is None else (M + added_M, z + added_z)
    return torch.cat(outputs)


def literal_infini(q, k, v, gate, segment_length, theta):
    """q [B, H, T, d], k, v [B, Hkv, T, d] to [B, H, T, d]; query heads h of a group share key-value head h // (H / Hkv)."""
    group = q.shape[1] // k.shape[1]
    rows = [
        torch.stack(
            [
                one_head(q[b, h], k[b, h // group], v[b, h // group], gate[h], segment_length, theta)
                for h in range(q.shape[1])
            ]
        )
        for b in range(q.shape[0])
    ]
    return torch.stack(rows)
