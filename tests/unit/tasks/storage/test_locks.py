"""What a lock leaves behind in its own process."""

import gc
from pathlib import Path

import pytest

from infini_llama.tasks.storage.locks import Busy, Lock


def test_a_failure_under_the_lock_frees_it_and_a_refusal_leaks_no_descriptor(tmp_path):
    with pytest.raises(ZeroDivisionError), Lock(tmp_path / "lock"):
        raise ZeroDivisionError
    gc.collect()  # descriptors of earlier tests that wait for the collector would close in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Lock(tmp_path / "lock"):
        for _ in range(5):
            with pytest.raises(Busy), Lock(tmp_path / "lock"):
                pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before
