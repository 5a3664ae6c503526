"""One run at a time on a GPU: waited for, given up when asked to stop, freed by the holder's death."""

import pytest

from infini_llama.tasks.records.machine import Cpu, Gpu, MachineFacts
from infini_llama.tasks.storage.locks import Lock
from infini_llama.tasks.train.stage import gpus_of, locked
from support.records import make_plan


def test_the_gpus_of_a_plan_by_identity_in_one_order():
    gpus = tuple(Gpu(name="one", uuid=uuid) for uuid in ("b", "a", ""))
    facts = MachineFacts(python="3.11", cpu=Cpu(model="x"), cores=2, versions={}, gpus=gpus)
    assert gpus_of(facts, make_plan(device="cuda", gpus=[0, 1])) == ["a", "b"]
    assert gpus_of(facts, make_plan(device="cuda", gpus=[2])) == ["number-2"]
    assert gpus_of(facts, make_plan()) == []


def test_a_wait_ends_on_a_stop_request(tmp_path):
    def stop() -> None:
        raise KeyboardInterrupt

    with Lock(tmp_path / "gpu-a.lock"), pytest.raises(KeyboardInterrupt), locked(["b", "a"], stop, tmp_path):
        raise AssertionError("it has a GPU that another one holds")
    with Lock(tmp_path / "gpu-b.lock"):
        pass
