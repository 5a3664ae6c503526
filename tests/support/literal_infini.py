"""Infini-attention written down as the paper prints it (arXiv 2404.07143, section 3.1): a loop over rows, heads and segments."""

import math

import torch


def turned(
    x: torch.Tensor, theta: float, positions: list[int] | None = None
) -> torch.Tensor:
    """x [N, d] with pair (i, i + d/2) of position t rotated by t / theta^(2i/d), one complex number a pair."""
    length, size = x.shape
    angles = torch.outer(
        torch.tensor(range(length) if positions is None else positions, dtype=x.dtype),
        theta ** -(torch.arange(0, size, 2, dtype=x.dtype) / size),
    )
    pairs = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((pairs.real, pairs.imag), dim=1)


def over_the_segment_before(
    Q, K, V, start, end, segment_length, theta, documents, sinks
):
    """Attention [n, d] of the tokens from `start` to before `end`, a segment, each over its document: its own segment up to itself, the one before, and its first tokens `sinks`, right before that."""
    outputs = []
    for i in range(start, end):
        document = [j for j in range(i + 1) if documents[j] == documents[i]]
        window = [j for j in document if j >= start - segment_length]
        firsts = [j for j in document[:sinks] if j < start - segment_length]
        places = [place - segment_length - len(firsts) for place in range(len(firsts))]
        places += [j - start for j in window]
        seen = firsts + window
        scores = (
            turned(Q[i : i + 1], theta, [i - start]) @ turned(K[seen], theta, places).T
        )
        outputs.append((scores / math.sqrt(Q.shape[1])).softmax(dim=1)[0] @ V[seen])
    return torch.stack(outputs)


def one_head(
    Q,
    K,
    V,
    beta,
    segment_length,
    theta,
    update,
    documents,
    Q_m,
    K_m,
    sinks,
):
    """Q, K, V [T, d] of one row and head, not rotated, and Q_m, K_m of the memory; `documents` a list of T numbers, -1 for padding; the output [T, d].

    A document's tokens find only what its own tokens wrote: the memory belongs to the document that the last segment ended in. With
    `sinks`, what a segment wrote is found from the one after the next on.
    """
    size = Q.shape[1]
    M, z, owner, outputs, last = None, None, None, [], None
    lagging = [(None, None, None)]
    for start in range(0, len(Q), segment_length):
        q, k, v = (x[start : start + segment_length] for x in (Q, K, V))
        docs = documents[start : start + segment_length]
        scores = turned(q, theta) @ turned(k, theta).T / math.sqrt(size)  # eq. 6
        hidden = [
            [j > i or docs[i] != docs[j] for j in range(len(q))] for i in range(len(q))
        ]
        A_dot = scores.masked_fill(torch.tensor(hidden), -math.inf).softmax(dim=1) @ v
        read_M, read_z, read_owner = M, z, owner
        if sinks:
            A_dot = over_the_segment_before(
                Q, K, V, start, start + len(q), segment_length, theta, documents, sinks
            )
            lagging.append((M, z, owner))
            read_M, read_z, read_owner = lagging[-2]
        q_m, k_m = (x[start : start + segment_length] for x in (Q_m, K_m))
        feature_q, feature_k = (
            torch.nn.functional.elu(q_m) + 1,
            torch.nn.functional.elu(k_m) + 1,
        )
        for i, document in enumerate(docs):
            if read_M is not None and read_z is not None and document == read_owner:
                A_mem = (feature_q[i] @ read_M) / (feature_q[i] @ read_z)  # eq. 7
                # eq. 10.
                outputs.append(beta.sigmoid() * A_mem + (1 - beta.sigmoid()) * A_dot[i])
            else:
                outputs.append(A_dot[i])
        last = next((document for document in reversed(docs) if document >= 0), last)
        if last is None:
            continue
        if last != owner:
            M, z, owner = None, None, last
        ours = torch.tensor([document == owner for document in docs])
        feature_k, v = feature_k[ours], v[ours]
        added_z = feature_k.sum(dim=0)
        if M is None or z is None:
            M, z = feature_k.T @ v, added_z
        elif update == "linear":
            M, z = M + feature_k.T @ v, z + added_z  # eq. 8
        else:
            weights = z if update == "delta" else z + added_z
            # eq. 9.
            M = M + feature_k.T @ (v - (feature_k @ M) / (feature_k @ weights)[:, None])
            z = z + added_z
    return torch.stack(outputs)


def mapped(x, A, b, head):
    """A x_t + b of every token of x [T, d]."""
    return x if A is None else torch.stack([A[head] @ token + b[head] for token in x])


def literal_infini(
    q,
    k,
    v,
    gate,
    segment_length,
    theta,
    update="linear",
    documents=None,
    maps=None,
    sinks=0,
):
    """q [B, H, T, d], k, v [B, Hkv, T, d] to [B, H, T, d]; query heads h of a group share key-value head h // (H / Hkv).

    `maps`: matrices and shifts of the queries' heads, and of the keys'. `sinks`: with them a segment also sees the one before.
    """
    A_q, b_q, A_k, b_k = maps or (None, None, None, None)
    group = q.shape[1] // k.shape[1]
    documents = (
        documents.tolist() if documents is not None else [[0] * q.shape[2]] * q.shape[0]
    )
    options = (segment_length, theta, update)
    rows = [
        torch.stack(
            [
                one_head(
                    q[b, h],
                    k[b, h // group],
                    v[b, h // group],
                    gate[h],
                    *options,
                    documents[b],
                    mapped(q[b, h], A_q, b_q, h),
                    mapped(k[b, h // group], A_k, b_k, h // group),
                    sinks,
                )
                for h in range(q.shape[1])
            ]
        )
        for b in range(q.shape[0])
    ]
    return torch.stack(rows)
