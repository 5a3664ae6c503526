"""A run whose machine is lost with its disk: another one goes on from the mirror, to the bit."""

import os
import shutil
import signal

import pytest

from infini_llama.tasks.runs.run_folder import RunFolder


@pytest.mark.slow
def test_an_empty_machine_resumes_the_run_bitwise(lab, uninterrupted, tmp_path):
    calm = uninterrupted("infini", 1)
    mirror = f"storage.mirror={tmp_path / 'mirror'}"
    started = lab.start("mirrored", mirror, "model.attention=infini")
    kept = tmp_path / "mirror" / "runs" / "mirrored" / "checkpoints"
    while not list(kept.glob("step-*/manifest.json")):
        assert started.process.poll() is None, started.log.read_text()
    os.killpg(started.process.pid, signal.SIGKILL)
    started.wait()
    lost = lab.run_dir("mirrored")
    datasets = lab.home / "datasets"
    while started.processes():
        pass
    shutil.rmtree(lost)
    shutil.move(datasets, tmp_path / "away")
    try:
        lab.finish("mirrored", mirror, "model.attention=infini")
    finally:
        shutil.rmtree(datasets, ignore_errors=True)
        shutil.move(tmp_path / "away", datasets)
    given = sorted(lost.glob("logs/attempt-*/plan.json"))
    assert '"resume_from": null' not in given[0].read_text()
    lab.assert_same("mirrored", calm)
    assert (tmp_path / "mirror" / "runs" / "mirrored" / "summary.json").exists()
    assert set(lost.glob("*.json*")) <= set(RunFolder(lost).records), (
        "what is not of these is lost with its machine"
    )
