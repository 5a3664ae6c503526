"""A filesystem that is really full: while the dataset is written, before the first checkpoint, and in mid-run."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from infini_llama.tasks.runs.run_folder import RunFolder, read_attempts
from support.laboratory import SOFTMAX_2, Laboratory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mount"),
        reason="fills a filesystem of its own: needs root, to mount a tmpfs",
    ),
]
MEBIBYTE = 1024**2


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], check=True
    )
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def grow(disk: Path, mebibytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={mebibytes}m", disk], check=True)


def fill(disk: Path) -> Path:
    """Takes all that is left, to the last block."""
    filling = disk / "filling"
    file = os.open(filling, os.O_CREAT | os.O_WRONLY)
    with suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    return filling


def used(disk: Path) -> int:
    return shutil.disk_usage(disk).used // MEBIBYTE


def test_each_stage_reports_a_full_disk_loses_nothing_and_resumes(
    lab, calm_softmax_2, disk
):
    # Its logs are elsewhere, or they could not be read.
    here = Laboratory(lab.home, lab.config)
    settings = (*SOFTMAX_2, "runtime.retries=0", f"runtime.home={disk}")

    def refused() -> str:
        started = here.start("full-disk", *settings)
        assert started.wait() == 70, started.log.read_text()
        assert not started.processes()
        log = started.log.read_text()
        assert "Traceback" not in log
        return log

    log = refused()
    assert (
        f"no space to write the dataset in {disk}" in log
        and "run the same command again" in log
    )
    assert not list(disk.glob("datasets/*/manifest.json")), "half a dataset is believed"

    grow(disk, 200)
    started = here.start("full-disk", *settings)
    run = disk / "runs/full-disk"
    while not list(run.glob("checkpoints/step-*/manifest.json")):
        assert started.process.poll() is None, started.log.read_text()
    grow(disk, used(disk) + 1)  # training goes on, and the next checkpoints do not fit
    filling = fill(disk)
    assert started.wait() == 70, started.log.read_text()
    assert (
        "no space" in started.log.read_text()
        and "Traceback" not in started.log.read_text()
    )
    assert not started.processes()

    log = refused()
    assert "checkpoint" in log and "free space" in log.lower(), log

    assert "no space" in read_attempts(RunFolder(run))[0].message
    filling.unlink()
    grow(disk, 200)
    assert here.start("full-disk", *settings).wait() == 0
    shutil.copytree(run, lab.run_dir("full-disk"), symlinks=True)
    lab.assert_same("full-disk", calm_softmax_2)
