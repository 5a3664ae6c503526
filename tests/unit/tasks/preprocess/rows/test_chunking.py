import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.rows import chunking, chunking_torch
from infini_llama.tasks.preprocess.rows.chunking import compute_starts, resolve_devices, row_count, row_starts
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.storage.artifacts import read_manifest

HAS_GPU = Path("/dev/nvidiactl").exists()


@given(tokens=st.integers(1, 5000), length=st.integers(2, 600), stride=st.integers(1, 600) | st.none())
def test_rows_are_every_place_where_a_row_and_its_last_label_fit(tokens, length, stride):
    step = min(stride or length, length)
    starts = row_starts(row_count(tokens, length, step if stride else None), step)
    assert starts.dtype == np.int64
    assert starts.tolist() == [start for start in range(0, tokens, step) if start + length + 1 <= tokens]


@given(first=st.integers(0, 3000), count=st.integers(0, 3000), step=st.integers(1, 5000), at_once=st.integers(1, 900))
def test_torch_gives_the_bytes_of_numpy_in_any_pieces(first, count, step, at_once):
    before, chunking_torch.ON_CPU = chunking_torch.ON_CPU, at_once
    try:
        pieces = [*chunking_torch.row_starts(first, first + count, step, "cpu")]
    finally:
        chunking_torch.ON_CPU = before
    assert all(piece.dtype == torch.int64 and len(piece) <= at_once for piece in pieces)
    found = b"".join(piece.numpy().tobytes() for piece in pieces)
    assert found == row_starts(first + count, step)[first:].tobytes()


def test_offsets_beyond_32_bits_are_exact_with_both():
    count, step = 1023, 2**42 + 1
    assert row_starts(count, step)[-1] == 1022 * step
    (rows,) = chunking_torch.row_starts(0, count, step, "cpu")
    assert rows.numpy().tobytes() == row_starts(count, step).tobytes()


def test_the_child_process_prints_its_share():
    command = [sys.executable, "-m", "infini_llama.tasks.preprocess.rows.chunking_torch", "cpu", "500", "90000", "7"]
    child = subprocess.run(command, capture_output=True, check=True)
    assert child.stdout == row_starts(90_000, 7)[500:].tobytes()


@pytest.mark.parametrize("count", [0, 1, 2, 10_001])
def test_several_devices_at_once_give_the_bytes_of_one(count):
    """Each device is a process of its own; here they are all of them the CPU, by torch."""
    assert compute_starts(count, 33, ["cpu"] * 3, required=True)[0].tobytes() == row_starts(count, 33).tobytes()


@pytest.mark.parametrize("strategy", [{}, {"strategy": "window", "stride": 5}])
def test_a_dataset_made_by_several_devices_has_the_bytes_of_one(data, tmp_path, monkeypatch, digests, strategy):
    alone = preprocess(data(**strategy), str(tmp_path / "one"))
    monkeypatch.setattr("infini_llama.tasks.preprocess.rows.tables.resolve_devices", lambda wanted: ["cpu", "cpu"])
    assert preprocess(data(**strategy, device="all"), str(tmp_path / "two")) == alone
    monkeypatch.undo()
    assert digests(tmp_path / "one" / "datasets") == digests(tmp_path / "two" / "datasets")
    manifest = read_manifest(tmp_path / "two" / alone["path"] / "chunks" / alone["chunks"], "chunks")
    assert manifest["meta"]["device"] == "cpu"


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
def test_the_manifest_names_the_device_that_did_the_work(data, tmp_path, monkeypatch, strategy):
    """Packing is numpy's, and so are rows that the chosen device failed to compute."""
    monkeypatch.setattr("infini_llama.tasks.preprocess.rows.tables.resolve_devices", lambda wanted: ["cuda:0"])
    failed = subprocess.CompletedProcess([], 1, b"", b"no GPU")
    monkeypatch.setattr(chunking, "_child", lambda step, share: failed)
    reference = preprocess(data(strategy=strategy, device="auto"), str(tmp_path))
    manifest = read_manifest(tmp_path / reference["path"] / "chunks" / reference["chunks"], "chunks")
    assert manifest["meta"]["device"] == "cpu"


def test_which_devices_are_meant(tmp_path, monkeypatch):
    monkeypatch.setattr(chunking, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resolve_devices("all") == resolve_devices("auto") == resolve_devices("cpu") == ["cpu"]
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia2", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert resolve_devices("all") == ["cuda:0", "cuda:1", "cuda:2"] and resolve_devices("cuda:1") == ["cuda:1"]
    assert resolve_devices("auto") == ["cuda:0"] and resolve_devices("cpu") == ["cpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert resolve_devices("all") == ["cuda:0", "cuda:1"]
    for visible, seen in {"1,-1,2": 1, " 2 , 0 ": 2, "0,,1": 1, "0,1,2,3": 3, "GPU-8932f937": 1}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert resolve_devices("all") == [f"cuda:{number}" for number in range(seen)]
    for none in ("", "-1", " -1", "-1,0", ",0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert resolve_devices("all") == resolve_devices("auto") == ["cpu"]


@pytest.mark.skipif(HAS_GPU, reason="here the GPU works")
def test_a_named_gpu_that_is_not_there_is_refused():
    for device in ("cuda", "cuda:1"):
        with pytest.raises(
            ConfigError, match=rf"data\.device={device}, but no NVIDIA driver .* use data\.device=auto or cpu"
        ):
            resolve_devices(device)


def test_a_driver_without_a_working_torch_means_the_cpu_with_a_line_or_a_refusal_if_asked_for_by_name(
    caplog, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with caplog.at_level(logging.WARNING):
        starts, used = compute_starts(99, 10, ["cuda:0"], required=False)
    assert starts.tobytes() == row_starts(99, 10).tobytes() and used == ["cpu"]
    assert "chunking on cuda:0 failed" in caplog.text and "the CPU does it, with the same bytes" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.device: cuda:1 does not work \(.*\); use data\.device=auto or cpu"):
        compute_starts(0, 10, ["cpu", "cuda:1"], required=True)


@pytest.mark.gpu
def test_gpus_give_the_bytes_of_numpy():
    assert chunking.resolve_devices("auto") == ["cuda:0"]
    for devices in (["cuda:0"], resolve_devices("all"), ["cuda:0", "cpu"]):
        found, used = compute_starts(10_000_001, 4096, devices, required=True)
        assert found.tobytes() == row_starts(10_000_001, 4096).tobytes() and used == devices
