"""One run at a time on a GPU: waited for, given up when asked to stop. Its owner's death frees it: test_locks.py."""

import os
from contextlib import ExitStack

import pytest

from infini_llama.tasks.records.machine import Cpu, Gpu, MachineFacts
from infini_llama.tasks.storage.locks import Busy, Lock
from infini_llama.tasks.train.locking import hold_gpus, identities


def test_a_gpu_in_use_is_waited_for(tmp_path, caplog):
    path = tmp_path / "gpu-a.lock"
    with ExitStack() as other:
        other.enter_context(Lock(path))
        with hold_gpus(["a", "b"], other.close, tmp_path) as locks:
            assert len(locks) == 2
            with pytest.raises(Busy), Lock(path):
                pass
    assert f"process {os.getpid()}" in caplog.text


def test_gpus_by_identity_in_one_order():
    gpus = tuple(Gpu(name="one", uuid=uuid) for uuid in ("b", "a", ""))
    facts = MachineFacts(
        python="3.11", cpu=Cpu(model="x"), cores=2, versions={}, gpus=gpus
    )
    assert identities(facts, (0, 1)) == ["a", "b"]
    assert identities(facts, (2,)) == ["number-2"]
    assert identities(facts, ()) == []


def test_a_wait_ends_on_a_stop_request(tmp_path):
    def stop() -> None:
        raise KeyboardInterrupt

    with (
        Lock(tmp_path / "gpu-a.lock"),
        pytest.raises(KeyboardInterrupt),
        hold_gpus(["b", "a"], stop, tmp_path),
    ):
        raise AssertionError("it has a GPU that another one holds")
    with Lock(tmp_path / "gpu-b.lock"):
        pass
