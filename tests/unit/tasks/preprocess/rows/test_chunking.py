from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.rows import chunking
from infini_llama.tasks.preprocess.rows.chunking import (
    compute_starts,
    resolve_device,
    row_count,
    row_starts,
    row_starts_by_torch,
)
from support.stages import preprocess, read_manifest

HAS_GPU = Path("/dev/nvidiactl").exists()


@given(tokens=st.integers(1, 5000), length=st.integers(2, 600), stride=st.integers(1, 600) | st.none())
def test_rows_are_every_place_where_a_row_and_its_last_label_fit(tokens, length, stride):
    step = min(stride or length, length)
    starts = row_starts(row_count(tokens, length, step if stride else None), step)
    assert starts.dtype == np.int64
    assert starts.tolist() == [start for start in range(0, tokens, step) if start + length + 1 <= tokens]


@settings(deadline=None)
@given(count=st.integers(0, 3000), step=st.integers(1, 2**42 + 1))
def test_torch_gives_the_bytes_of_numpy(count, step):
    found = row_starts_by_torch(count, step, "cpu")
    assert found.dtype == np.int64 and found.tobytes() == row_starts(count, step).tobytes()


def test_offsets_beyond_32_bits_are_exact():
    assert row_starts(1023, 2**42 + 1)[-1] == 1022 * (2**42 + 1)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A driver, and a GPU whose work is torch's on the CPU, without a process of its own."""
    monkeypatch.setattr(chunking, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(chunking, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    by_torch = chunking.row_starts_by_torch
    monkeypatch.setattr(chunking, "row_starts_by_torch", lambda count, step, _: by_torch(count, step, "cpu"))


@pytest.mark.parametrize("changed", [{}, {"strategy": "window", "stride": 5}, {"strategy": "best_fit"}])
def test_a_dataset_made_by_a_gpu_has_the_bytes_of_the_cpus_and_names_what_worked(data, tmp_path, digests, gpu, changed):
    devices = []
    for name, requested in (("gpu", "cuda:0"), ("cpu", "auto")):
        found = preprocess(data(**changed, device=requested), str(tmp_path / name))
        manifest = read_manifest(tmp_path / name / found["path"] / "chunks" / found["chunks"], "chunks")
        devices.append(manifest["meta"]["device"])
    assert devices == ["cpu" if "best_fit" in changed.values() else "cuda:0", "cpu"]
    assert digests(tmp_path / "cpu" / "datasets") == digests(tmp_path / "gpu" / "datasets")


def test_device_names(tmp_path, monkeypatch, gpu):
    assert resolve_device("cuda:1") == "cuda:1" and resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == resolve_device("auto") == "cpu"
    for visible in ("2,0", "1,-1,2", "GPU-8932f937"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert resolve_device("cuda") == "cuda"
    for none in ("", "-1", " -1", "-1,0", ",0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        with pytest.raises(ConfigError):
            resolve_device("cuda")


@pytest.mark.skipif(HAS_GPU, reason="here the GPU works")
def test_a_named_gpu_that_is_not_there_is_refused():
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=rf"data\.device={device}.*data\.device=auto"):
            resolve_device(device)


@pytest.mark.gpu
def test_a_gpu_gives_the_bytes_of_numpy():
    starts = compute_starts(10_000_001, 4096, resolve_device("cuda:0"))
    assert starts.tobytes() == row_starts(10_000_001, 4096).tobytes()
