"""Limits are read from real folders shaped like those of containers; the rest is asked of this machine itself."""

import json
import os

import pytest

from infini_llama.tasks.patch_environment.probe.gpus import gpus
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.records.machine import Gpu, GpuFacts
from support.machines import changed, with_driver

GPUS = {"gpus": [{"name": "H100", "capability": [9, 0]}], "nccl": True, "attention": {}}
ANSWER = f"print('noise'); print('''{json.dumps(GPUS)}''')"
FOUND = Gpu(name="H100", capability=(9, 0))


@pytest.mark.parametrize(
    ("questions", "seconds", "expected"),
    [
        (ANSWER, 60, GpuFacts(gpus=(FOUND,), nccl=True)),
        ("raise RuntimeError('driver too old')", 60, GpuFacts(gpus=(), gpu_fault="RuntimeError: driver too old")),
        ("import os; os.abort()", 60, GpuFacts(gpus=(), gpu_fault="torch ended with code -6")),
        ("import time; time.sleep(60)", 0.3, GpuFacts(gpus=(), gpu_fault="torch did not answer within 0.3 seconds")),
    ],
)
def test_the_child_that_probes_torch_may_answer_fail_die_or_hang(tmp_path, questions, seconds, expected):
    assert changed(gpus(with_driver(tmp_path, questions=questions), seconds), {"driver": None}) == expected


def test_the_real_questions_run(tmp_path):
    """On a machine with a GPU they describe it; on one without, torch says so in a sentence."""
    answer = gpus(with_driver(tmp_path))
    assert answer.gpus or any(word in answer.gpu_fault for word in ("CUDA", "NVIDIA"))


def test_an_installed_flash_attn_is_imported_without_a_gpu(tmp_path):
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.11.0: cannot open shared object file')")
    paths = os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", "")))
    found = gpus(Machine(root=tmp_path, environ=dict(os.environ) | {"PYTHONPATH": paths}))
    assert not found.gpus and "CUDA 11.0" in found.attention["flash2"]
