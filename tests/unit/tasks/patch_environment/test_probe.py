"""Limits are read from real folders shaped like those of containers; the rest is asked of this machine itself."""

import json
import os
from pathlib import Path

import pytest

from tasks.patch_environment.gpus import gpus
from tasks.patch_environment.limits import memory, usable_cores
from tasks.patch_environment.probe import disk, probe

GIB = 1024**3


@pytest.fixture
def group(tmp_path):
    """Writes control-group files and this process's membership; returns what limits.py is given."""

    def write(membership: str, files: dict[str, str]) -> tuple[Path, Path]:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path / "cgroup", tmp_path / "membership"

    return write


def affinity() -> int:
    return len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("0::/not/seen/here", {"cpu.max": "100000 100000"}, 1),
        ("4:cpu:/docker/x", {"cpu/docker/x/cpu.cfs_quota_us": "100000", "cpu/docker/x/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/\n0::/", {}, None),
    ],
)
def test_the_tightest_quota_of_the_control_groups_limits_the_cores(group, membership, files, cores):
    assert usable_cores(*group(membership, files)) == (cores or affinity())


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/a", {"a/memory.max": str(GIB), "a/memory.current": str(GIB // 4), "memory.max": "max"}),
        ("0::/a", {"memory.max": str(GIB), "memory.current": str(GIB // 4)}),
        ("3:memory:/", {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": str(GIB // 4)}),
    ],
)
def test_the_tightest_limit_of_the_control_groups_is_the_memory(group, membership, files):
    assert memory(*group(membership, files)) == {"total": GIB, "available": GIB * 3 // 4}


def test_without_a_limit_the_memory_is_the_machines(group):
    facts = memory(*group("0::/", {"memory.max": "max", "memory.current": "1"}))
    assert facts["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= facts["available"] > 0


def test_a_home_is_tried_and_not_made(tmp_path):
    facts = disk(tmp_path / "not" / "there")
    assert facts["works"] and facts["path"] == str(tmp_path) and facts["free"] > 0
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses new files")
def test_a_home_that_cannot_be_written_is_a_fact_not_a_crash():
    facts = disk(Path("/proc/not/there"))
    assert not facts["works"] and facts["fault"] and facts["path"] == "/proc"


def test_facts_are_json_and_quickly_had(tmp_path):
    facts = probe(tmp_path)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cores"] >= 1 and facts["versions"]["torch"] and facts["port"]


ANSWER = (
    """import json; print("noise"); print(json.dumps({"gpus": [{"name": "x"}], "nccl": True, "flash_attn": False}))"""
)


@pytest.mark.parametrize(
    ("questions", "seconds", "expected"),
    [
        (ANSWER, 60, {"gpus": [{"name": "x"}], "nccl": True}),
        ("raise RuntimeError('driver too old')", 60, {"gpus": [], "gpu_fault": "RuntimeError: driver too old"}),
        ("import os; os.abort()", 60, {"gpus": [], "gpu_fault": "torch ended with code -6"}),
        ("import time; time.sleep(60)", 0.3, {"gpus": [], "gpu_fault": "torch did not answer within 0.3 seconds"}),
    ],
)
def test_the_child_that_asks_torch_may_answer_fail_die_or_hang(tmp_path, monkeypatch, questions, seconds, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert expected.items() <= gpus((tmp_path,), questions, seconds).items()


def test_gpus_that_are_hidden_or_absent_are_not_asked_for(tmp_path, monkeypatch):
    assert gpus((tmp_path / "no driver",), "raise SystemExit(1)") == {"gpus": [], "nccl": False, "flash_attn": False}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "gpu_fault" not in gpus((tmp_path,), "raise SystemExit(1)")


def test_the_real_questions_run(tmp_path, monkeypatch):
    """On a machine with a GPU they describe it; on one without, torch says so in a sentence."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answer = gpus((tmp_path,))
    assert (answer["gpus"] and answer["gpus"][0].keys() == {"name", "capability", "memory", "free", "bf16"}) or any(
        word in answer["gpu_fault"] for word in ("CUDA", "NVIDIA")
    )
