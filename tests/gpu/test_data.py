"""Rows and masks that CUDA computes have the bytes of the CPU's."""

import numpy as np
import pytest
import torch

from infini_llama.configs.packing import ON_A_GPU
from infini_llama.model.config import LlamaConfig
from infini_llama.model.layout import boundaries, positions, rows, segments
from infini_llama.tasks.preprocess.rows.packing import compute_rows
from infini_llama.tasks.preprocess.rows.tables import rows_on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ON_A_GPU)
def test_rows(strategy):
    lengths = np.clip(
        np.random.default_rng(7).lognormal(6.6, 1.5, 300_000), 1, 200_000
    ).astype(np.int64)
    stride = 500 if strategy == "window" else None
    expected = compute_rows(lengths, strategy, 2048, stride)
    with rows_on("cuda:0") as compute:
        found = compute(lengths, strategy, 2048, stride)
    assert found.entries.tobytes() == expected.entries.tobytes()
    assert (
        expected.pieces is None or found.pieces.tobytes() == expected.pieces.tobytes()
    )


def test_positions_and_masks_of_documents():
    generator = torch.Generator().manual_seed(0)
    documents = (
        (torch.rand(8, 2048, generator=generator) < 0.003)
        .int()
        .cumsum(1, dtype=torch.int32)
    )
    documents[3, 1500:] = -1
    documents[4] = 0
    config = LlamaConfig(
        512, 256, 512, 2, 4, 2, 2048, attention="infini", segment_length=256
    )
    tensors = []
    for device in ("cpu", "cuda"):
        there, like = documents.to(device), torch.zeros(8, 2048, 4, device=device)
        found = [positions(there), boundaries(there), boundaries(there, 64)]
        for layout in (
            rows(config, there.shape, there, like, True),
            segments(config, there.shape, there, like, True),
        ):
            found += [part for part in layout if isinstance(part, torch.Tensor)]
        tensors.append([part.cpu() for part in found])
    assert len(tensors[0]) == 3 + 2 + 5
    assert all(torch.equal(cpu, cuda) for cpu, cuda in zip(*tensors, strict=True))
