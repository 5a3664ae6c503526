import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from tasks.preprocess import chunking, chunking_torch
from tasks.preprocess.chunking import compute_rows, resolve_device, row_starts

HAS_GPU = Path("/dev/nvidiactl").exists()


@given(tokens=st.integers(1, 5000), length=st.integers(2, 600))
def test_rows_are_every_place_where_a_row_and_its_last_label_fit(tokens, length):
    starts = row_starts(tokens, length)
    assert starts.dtype == np.int64
    assert starts.tolist() == [start for start in range(0, tokens, length) if start + length + 1 <= tokens]


@given(tokens=st.integers(1, 100_000), length=st.integers(2, 5000))
def test_torch_gives_the_bytes_of_numpy(tokens, length):
    table = chunking_torch.row_starts(tokens, length, "cpu").numpy()
    assert table.dtype == np.int64 and table.tobytes() == row_starts(tokens, length).tobytes()


def test_offsets_beyond_32_bits_are_exact_with_both():
    tokens, length = 2**52, 2**42 + 1
    assert row_starts(tokens, length)[-1] == 1022 * length
    assert chunking_torch.row_starts(tokens, length, "cpu").numpy().tobytes() == row_starts(tokens, length).tobytes()


def test_the_child_process_prints_the_table():
    command = [sys.executable, "-m", "tasks.preprocess.chunking_torch", "cpu", "100000", "7"]
    child = subprocess.run(command, capture_output=True, check=True)
    assert child.stdout == row_starts(100_000, 7).tobytes()


@pytest.mark.skipif(HAS_GPU, reason="here the GPU works")
def test_without_a_gpu_auto_is_the_cpu_and_a_named_gpu_is_refused():
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    for device in ("cuda", "cuda:1"):
        with pytest.raises(
            ConfigError, match=rf"data\.device={device}, but no NVIDIA driver .* use data\.device=auto or cpu"
        ):
            resolve_device(device)


def test_a_driver_without_a_working_torch_means_the_cpu_with_a_line_or_a_refusal_if_asked_for_by_name(
    caplog, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with caplog.at_level(logging.WARNING):
        assert compute_rows(1000, 10, "cuda:0", required=False).tobytes() == row_starts(1000, 10).tobytes()
    assert "chunking on cuda:0 failed" in caplog.text and "the CPU does it, with the same bytes" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.device=cuda:0 does not work \(.*\); use data\.device=auto or cpu"):
        compute_rows(1000, 10, "cuda:0", required=True)


@pytest.mark.gpu
def test_a_gpu_gives_the_bytes_of_numpy():
    assert chunking.resolve_device("auto") == "cuda:0"
    assert compute_rows(10_000_001, 4096, "cuda:0", required=True).tobytes() == row_starts(10_000_001, 4096).tobytes()
