"""Limits are read from real folders shaped like those of containers; the rest is asked of this machine itself."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from infini_llama.tasks.machine import Machine, memory, usable_cores
from infini_llama.tasks.patch_environment.gpus import gpus
from infini_llama.tasks.patch_environment.machine import (
    disk,
    folders,
    shared_memory_fault,
)
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.records.machine import GpuFacts, MachineFacts, Memory
from support.machines import FILES, with_driver

GIB = 1024**3


@pytest.fixture
def group(tmp_path):
    """A machine of 8 cores and 64 GiB with these control-group files, and this process's membership."""

    def write(membership: str, files: dict[str, str]) -> Machine:
        inside = {f"sys/fs/cgroup/{name}": text + "\n" for name, text in files.items()}
        for name, text in (FILES | {"proc/self/cgroup": membership} | inside).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(root=tmp_path)

    return write


def test_the_cores_of_this_machine_are_those_of_its_affinity():
    assert 1 <= usable_cores(Machine()) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("0::/not/seen/here", {"cpu.max": "100000 100000"}, 1),
        (
            "4:cpu:/docker/x",
            {
                "cpu/docker/x/cpu.cfs_quota_us": "100000",
                "cpu/docker/x/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (
            "4:cpu,cpuacct:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            8,
        ),
        ("4:memory:/\n0::/", {}, 8),
    ],
)
def test_the_tightest_quota_of_the_control_groups_limits_the_cores(
    group, membership, files, cores
):
    assert usable_cores(group(membership, files)) == cores


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (
            "0::/a",
            {
                "a/memory.max": str(GIB),
                "a/memory.current": str(GIB // 4),
                "memory.max": "max",
            },
        ),
        ("0::/a", {"memory.max": str(GIB), "memory.current": str(GIB // 4)}),
        (
            "3:memory:/",
            {
                "memory/memory.limit_in_bytes": str(GIB),
                "memory/memory.usage_in_bytes": str(GIB // 4),
            },
        ),
        # of files, which the kernel drops where memory is needed
        (
            "0::/",
            {
                "memory.max": str(GIB),
                "memory.current": str(GIB // 2),
                "memory.stat": f"anon 9\nactive_file 7\ninactive_file {GIB // 4}",
            },
        ),
        (
            "3:memory:/",
            {
                "memory/memory.limit_in_bytes": str(GIB),
                "memory/memory.usage_in_bytes": str(GIB // 2),
                "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 4}",
            },
        ),
    ],
)
def test_the_tightest_limit_of_the_control_groups_is_the_memory(
    group, membership, files
):
    assert memory(group(membership, files)) == Memory(
        total=GIB, available=GIB * 3 // 4, limit="control group"
    )


def test_without_a_limit_the_memory_is_the_machines(group):
    facts = memory(group("0::/", {"memory.max": "max", "memory.current": "1"}))
    assert facts == Memory(total=64 * GIB, available=60 * GIB)


def test_the_memory_of_a_kernel_that_does_not_estimate_it_is_the_free_one(
    group, monkeypatch
):
    monkeypatch.setitem(
        FILES,
        "proc/meminfo",
        f"MemTotal: {64 * 1024**2} kB\nMemFree: {30 * 1024**2} kB\n",
    )
    assert memory(group("0::/", {})) == Memory(total=64 * GIB, available=30 * GIB)


def test_a_home_is_probed_without_creating_it(tmp_path):
    facts = disk(tmp_path / "not" / "there", Machine())
    assert not facts.fault and facts.path == str(tmp_path) and facts.free
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a file system that refuses new files"
)
def test_a_home_that_cannot_be_written_is_a_fact_not_a_crash():
    facts = disk(Path("/proc/not/there"), Machine())
    assert facts.fault and facts.path == "/proc"


def test_the_folders_of_libraries_are_tried(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    tried = folders(
        Machine(
            environ={
                "HOME": str(tmp_path),
                "PREFECT_HOME": str(tmp_path / "file" / "x"),
            }
        )
    )
    assert [(folder.setting, bool(folder.fault)) for folder in tried] == [
        ("HOME", False),
        ("PREFECT_HOME", True),
        ("TMPDIR", False),
    ]
    monkeypatch.setattr(
        tempfile, "gettempdir", lambda: Path("/not/there/at/all").stat()
    )
    assert folders(Machine(environ={}))[0].fault


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a file system that refuses new files"
)
def test_shared_memory_that_cannot_be_written_is_a_fact(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "shm").symlink_to("/proc")
    assert shared_memory_fault(Machine(root=tmp_path))


def test_facts_are_json_and_quickly_had(tmp_path):
    facts = probe(tmp_path)
    assert MachineFacts.model_validate(json.loads(json.dumps(facts.to_json()))) == facts
    assert facts.cores >= 1 and facts.versions["torch"]


def test_gpus_that_are_hidden_or_absent_are_not_asked_for(tmp_path):
    nothing = GpuFacts(gpus=())
    assert (
        gpus(Machine(root=tmp_path, gpu_probe=("-c", "raise SystemExit(1)"))) == nothing
    )
    hidden = Machine(
        root=with_driver(tmp_path).root,
        environ={"CUDA_VISIBLE_DEVICES": ""},
        gpu_probe=("-c", "raise SystemExit(1)"),
    )
    assert gpus(hidden) == nothing


def test_free_space_is_that_of_the_disk_with_the_checkpoints(tmp_path):
    home = tmp_path / "home"
    (tmp_path / "large" / "run" / "checkpoints").mkdir(parents=True)
    home.mkdir()
    (home / "runs").symlink_to(tmp_path / "large")

    def free_bytes(path: Path) -> int:
        return 1000 if "large" in str(path.resolve()) else 1

    machine = Machine(free_bytes=free_bytes)
    assert disk(home, machine).free == 1
    assert [disk(home, machine, run).free for run in ("run", "new")] == [1000, 1000]
