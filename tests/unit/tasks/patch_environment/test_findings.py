"""Each fact that endangers a run is a finding with its cure."""

import pytest

from infini_llama.configs.reading import changed
from infini_llama.tasks.patch_environment.findings import assess
from infini_llama.tasks.patch_environment.probe import probe
from support.machines import H100

DISK = {"path": "/x", "free": 10**12, "kind": "ext4", "network": False}


def unusable(setting: str) -> dict:
    return {
        "folders": [
            {
                "setting": setting,
                "path": "/x",
                "fault": "files cannot be written (Permission denied)",
            }
        ]
    }


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    facts = probe(tmp_path_factory.mktemp("home"))
    return changed(facts, gpus=[], nccl=False)


@pytest.mark.parametrize(
    ("change", "name", "severity", "cure"),
    [
        (
            {"gpu_fault": "CUDA driver version is insufficient"},
            "GPUs",
            "warning",
            "update the driver",
        ),
        ({"gpus": []}, "GPUs", "note", "on the CPU"),
        ({"gpus": [H100], "nccl": False}, "nccl", "warning", "install a CUDA build"),
        (
            {"flash_attention": "built for glibc 2.38"},
            "flash attention",
            "warning",
            "glibc 2.38",
        ),
        (
            {
                "disk": DISK
                | {"fault": "files cannot be written (Read-only file system)"}
            },
            "disk",
            "error",
            "(Read-only file system); set runtime.home",
        ),
        ({"disk": DISK | {"free": 10**9}}, "disk", "warning", "free disk space"),
        (
            {"memory": {"total": 10**9, "available": 10**9, "limit": "machine"}},
            "memory available",
            "warning",
            "fewer workers",
        ),
        (
            {"shared_memory": 64 * 2**20, "gpus": [H100] * 2},
            "/dev/shm",
            "warning",
            "--shm-size",
        ),
        (
            {"shared_memory": None, "gpus": [H100] * 2},
            "/dev/shm",
            "warning",
            "--shm-size",
        ),
        (
            {"shared_memory": None, "platform": "Linux-6"},
            "/dev/shm",
            "note",
            "data.num_workers=1",
        ),
        ({"shared_memory": 4096}, "/dev/shm", "note", "data.num_workers=1"),
        (
            {"shared_memory_fault": "files cannot be written (x)"},
            "/dev/shm",
            "note",
            "(x). Several",
        ),
        (
            {"loopback_fault": "Network is unreachable"},
            "loopback",
            "warning",
            "ip link set lo up",
        ),
        ({"open_files": 20}, "open files", "error", "ulimit -n"),
        ({"address_space": 10**9}, "address space", "error", "ulimit -v"),
        ({"address_space": 10**10}, "address space", "note", "ulimit -v"),
        (unusable("HOME"), "home folder", "note", "set HF_HOME to a folder"),
        (unusable("PREFECT_HOME"), "Prefect's folder", "warning", "--no-prefect"),
        (unusable("TMPDIR"), "temporary folder", "error", "set TMPDIR"),
    ],
)
def test_faults_are_found_and_explained(laptop, change, name, severity, cure):
    (found,) = [
        found for found in assess(changed(laptop, **change)) if found.name == name
    ]
    assert (
        found.severity == severity
        and cure in found.sentence
        and found.sentence.endswith(".")
    )


@pytest.mark.parametrize(
    "change",
    [{"shared_memory": 2**20}, {"shared_memory": 2**20, "gpus": [H100], "nccl": True}],
)
def test_little_shared_memory_matters_for_several_gpus_only(laptop, change):
    (found,) = [
        found for found in assess(changed(laptop, **change)) if found.name == "/dev/shm"
    ]
    assert found.severity == "ok"
