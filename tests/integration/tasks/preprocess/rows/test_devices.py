"""Rows computed by torch have the bytes of numpy's, and a manifest names the device that computed them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.packing import ON_A_GPU, PACKED
from infini_llama.tasks.preprocess.rows import tables
from infini_llama.tasks.preprocess.rows.packing import compute_rows
from infini_llama.tasks.preprocess.rows.tables import (
    require_device,
    rows_by_torch,
    rows_on,
)
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.storage.artifacts import read_row_table

LENGTHS = np.array([100, 20, 1, 7, 10, 11])


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40) | st.integers(1, 6), max_size=60),
    length=st.integers(2, 20),
    stride=st.integers(1, 20),
    strategy=st.sampled_from(ON_A_GPU),
)
@example(lengths=[2**42 + 1, 1, 7], length=2**40, stride=2**40 - 1, strategy="window")
@example(lengths=[2**42 + 1, 1, 7], length=2**40, stride=1, strategy="greedy")
@example(lengths=[1, 1], length=2, stride=1, strategy="greedy")
@example(lengths=[1, 1], length=2, stride=1, strategy="padded")
def test_torch_gives_the_bytes_of_numpy(lengths, length, stride, strategy):
    documents = np.array(lengths, dtype=np.int64)
    step = min(stride, length) if strategy == "window" else None
    expected = compute_rows(documents, strategy, length, step)
    found = rows_by_torch(documents, strategy, length, step, "cpu")
    assert len(found) == len(expected)
    for array, other in (
        (found.entries, expected.entries),
        (found.pieces, expected.pieces),
    ):
        assert (array is None) is (other is None)
        assert array is None or (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array is None or (
            array.tobytes() == other.tobytes() and array.flags.c_contiguous
        )


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A driver, and a GPU whose work torch does on the CPU."""
    monkeypatch.setattr(tables, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(
        "concurrent.futures.ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1)
    )
    monkeypatch.setattr(
        tables,
        "rows_by_torch",
        lambda *arguments: rows_by_torch(*arguments[:-1], "cpu"),
    )


@pytest.mark.parametrize("strategy", ["concat", "window", *PACKED])
def test_a_gpu_gives_the_bytes_of_the_cpu_and_is_recorded(
    data, tmp_path, digests, gpu, strategy
):
    settings, devices = (
        {"packing": strategy} | ({"stride": 5} if strategy == "window" else {}),
        [],
    )
    for name, requested in (("gpu", "cuda:0"), ("cpu", "auto")):
        reference = preprocess(data(**settings, device=requested), tmp_path / name)
        table = tmp_path / name / reference.path / "chunks" / reference.row_table
        devices.append(read_row_table(table).meta.device)
    assert devices == ["cuda:0" if strategy in ON_A_GPU else "cpu", "cpu"]
    assert digests(tmp_path / "cpu" / "datasets") == digests(
        tmp_path / "gpu" / "datasets"
    )


def test_gpus_that_are_visible(monkeypatch, gpu):
    for device in ("cuda:1", "cuda", "cpu", "auto"):
        require_device(device)
    for visible in ("2,0", "1,-1,2", "GPU-8932f937"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        require_device("cuda")
    for none in ("", "-1", " -1", "-1,0", ",0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        with pytest.raises(ConfigError):
            require_device("cuda")


def test_rows_that_the_cpu_computes_need_no_gpu(data, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "DEVICES", tmp_path)  # without a driver
    assert preprocess(data(packing="best_fit", device="cuda"), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.device=cuda"):
        preprocess(data(packing="greedy", device="cuda"), tmp_path / "other")


def test_a_gpu_that_fails_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        rows_on("cuda:1") as compute,
        pytest.raises(ConfigError, match=r"data\.device: cuda:1"),
    ):
        compute(LENGTHS, "greedy", 10, None)


def test_the_process_returns_the_rows():
    with rows_on("cpu:0") as compute:  # which torch takes for the CPU; numpy's is "cpu"
        for strategy, stride in (
            ("concat", None),
            ("window", 3),
            ("padded", None),
            ("greedy", None),
        ):
            found, expected = (
                compute(LENGTHS, strategy, 10, stride),
                compute_rows(LENGTHS, strategy, 10, stride),
            )
            assert found.entries.tobytes() == expected.entries.tobytes()
            assert (
                expected.pieces is None
                or found.pieces.tobytes() == expected.pieces.tobytes()
            )
